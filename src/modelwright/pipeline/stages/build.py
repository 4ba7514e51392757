"""The chain of stages that a configuration describes, in order, each with its parents."""

from collections.abc import Callable, Sequence

from modelwright.core.artifacts import is_finished
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.runner import check_order
from modelwright.pipeline.stage import Stage
from modelwright.pipeline.stages.clean import clean_stage
from modelwright.pipeline.stages.evaluate import evaluate_stage
from modelwright.pipeline.stages.init import init_stage
from modelwright.pipeline.stages.pack import pack_stage
from modelwright.pipeline.stages.quantize import quantize_stage
from modelwright.pipeline.stages.report import report_stage
from modelwright.pipeline.stages.serve import serve_stage
from modelwright.pipeline.stages.tokenize import tokenize_stage
from modelwright.pipeline.stages.training import pretrain_stage, sft_stage


def build_stages(config: RunConfig, run: RunDir, only: Sequence[str] = ()) -> list[Stage]:
    """All stages of a resolved configuration, parents first.

    only: the stages to work on (empty: all). The report reads the stages in `only` and those that are finished, and
    `quantize` reads `evaluate` under the same condition; all other parents are required. With `init_from` the stage
    `init` copies the model and its tokenizer, and there is no `tokenize`. Reads only the names and sizes of the
    sources; raises `DataError` or `ModelError` if they are missing.
    """
    present = [name for name in config.stages if not only or name in only or is_finished(run.stage(name).artifact)]
    builders: dict[str, Callable[[], Stage]] = {
        "clean": lambda: clean_stage(config),
        "tokenize": lambda: tokenize_stage(config),
        "pack": lambda: pack_stage(config),
        "pretrain": lambda: pretrain_stage(config),
        "sft": lambda: sft_stage(config),
        "evaluate": lambda: evaluate_stage(config),
        "quantize": lambda: quantize_stage(config, evaluated="evaluate" in present),
        "serve_check": lambda: serve_stage(config),
        "report": lambda: report_stage(config, run, present),
    }
    stages = [init_stage(config)] if config.init_from else []
    stages += [builders[name]() for name in config.stages if not (config.init_from and name == "tokenize")]
    check_order(stages)
    return stages
