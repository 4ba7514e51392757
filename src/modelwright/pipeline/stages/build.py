"""The chain of stages that a configuration describes, in order, each with its parents."""

from collections.abc import Sequence

from modelwright.core.artifacts import is_finished
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.runner import check_order
from modelwright.pipeline.stage import Stage


def build_stages(config: RunConfig, run: RunDir, only: Sequence[str] = ()) -> list[Stage]:
    """All stages of a resolved configuration, parents first.

    only: the stages to work on (empty: all). Stages in `only` and those that are finished are present: the report reads
    all of them, and `quantize` reads `evaluate` if it is. All other parents are required. Reads only the names and
    sizes of the sources; raises `DataError` or `ModelError` if they are missing.
    """
    present = [
        stage.name
        for stage in config.stages
        if not only or stage.is_implied or stage.name in only or is_finished(run.stage(stage.name).artifact)
    ]
    stages = [stage.build(config, run, present) for stage in config.stages]
    check_order(stages)
    return stages
