"""The stages of the pipeline in order, and the chain of stages of a configuration. This is the only list of them: a new
stage is a file in this folder and a line here, or an entry point of another package.
"""

import functools
from collections.abc import Sequence

from modelwright.core.artifacts import RunDir, is_finished
from modelwright.core.config import ConfigError
from modelwright.core.extensions import installed
from modelwright.pipeline.stage import RunConfig, Stage, StageSpec
from modelwright.pipeline.stages.align import ALIGN
from modelwright.pipeline.stages.average import AVERAGE
from modelwright.pipeline.stages.caption import CAPTION
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.distill import DISTILL
from modelwright.pipeline.stages.dpo import DPO
from modelwright.pipeline.stages.evaluate import EVALUATE
from modelwright.pipeline.stages.grpo import GRPO
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.kto import KTO
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.ppo import PPO
from modelwright.pipeline.stages.pretrain import PRETRAIN
from modelwright.pipeline.stages.qat import QAT
from modelwright.pipeline.stages.quantize import QUANTIZE
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.reward import REWARD
from modelwright.pipeline.stages.serve import SERVE_CHECK
from modelwright.pipeline.stages.sft import SFT
from modelwright.pipeline.stages.student import STUDENT
from modelwright.pipeline.stages.tokenize import TOKENIZE
from modelwright.pipeline.stages.vision import VISION

STAGES: tuple[StageSpec, ...] = (
    INIT, CLEAN, TOKENIZE, PACK, PRETRAIN, ALIGN, VISION, SFT, REWARD, DPO, KTO, GRPO, PPO, STUDENT, DISTILL, AVERAGE,
    QAT, CAPTION,
    EVALUATE, QUANTIZE, SERVE_CHECK, REPORT,
)  # fmt: skip

STAGES_GROUP = "modelwright.stages"
"""Entry points of other packages: each a `StageSpec`."""


def stage_names() -> tuple[str, ...]:
    """Returns the stages that a user may name, in the pipeline's order."""
    return tuple(stage.name for stage in known_stages() if not stage.is_implied)


@functools.cache
def known_stages() -> tuple[StageSpec, ...]:
    """Returns the stages of this package and of all installed ones, in the pipeline's order.

    Raises `ConfigError` as `installed` does, for a stage that is not named like its entry point, and for one that
    follows an unknown stage.
    """
    known = list(STAGES)
    for name, spec in installed(STAGES_GROUP, StageSpec, taken=tuple(stage.name for stage in STAGES)).items():
        where = f"entry point {name} of {STAGES_GROUP}"
        names = [stage.name for stage in known]
        if spec.name != name:
            raise ConfigError(f"{where}: is the stage {spec.name!r}; both must have one name")
        if spec.follows not in names:
            raise ConfigError(f"{where}: follows {spec.follows!r}, which is not one of {', '.join(names)}")
        # Of several that follow the same stage, the one that was installed last comes first.
        known.insert(names.index(spec.follows) + 1, spec)
    return tuple(known)


def build_stages(config: RunConfig, run: RunDir, only: Sequence[str] = ()) -> list[Stage]:
    """Returns all stages of a resolved configuration, parents first.

    only: stages to work on (empty: all). Stages in `only` and those that are finished are present: the report reads all
    of them, and `quantize` reads `evaluate` if it is. All other parents are required. Reads only the names and sizes of
    the sources; raises `DataError` or `ModelError` if they are missing.
    """
    present = [
        stage.name
        for stage in config.stages
        if not only or stage.is_implied or stage.name in only or is_finished(run.stage(stage.name).artifact)
    ]
    stages = [stage.build(config, run, present) for stage in config.stages]
    # Only a bug in the chain can break this: every parent precedes its child.
    before: set[str] = set()
    for stage in stages:
        assert before.issuperset(stage.parents), f"{stage.name} precedes one of {stage.parents}"
        before.add(stage.name)
    return stages
