"""Names of the stages that provide the tokenizer, the start of a training, the reward model, and the final model."""

from itertools import takewhile

from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.tokenize import TOKENIZE

FIRST_TRAINING = "pretrain"
"""The stage that makes a model out of random weights."""


def tokenizer_stage(config: RunConfig) -> str:
    """The stage whose artifact contains the tokenizer."""
    return INIT.name if config.init_from else TOKENIZE.name


def model_before(config: RunConfig, stage: str) -> str:
    """The stage whose model training in `stage` starts from, "" for random weights. The model of `stage` itself need
    not be one of those that later stages continue (a reward model is not).
    """
    earlier = takewhile(lambda one: one.name != stage, config.stages)
    return next((one.name for one in reversed(list(earlier)) if one.model_title), "")


def reward_model_before(config: RunConfig, stage: str) -> str:
    """The last stage before `stage` whose artifact is a reward model, "" without one."""
    earlier = takewhile(lambda one: one.name != stage, config.stages)
    return next((one.name for one in reversed(list(earlier)) if one.is_reward_model), "")


def final_model(config: RunConfig) -> str:
    """The stage whose model is the run's result, "" if the run trains none."""
    return config.model_names[-1] if config.model_names else ""


def needed_model(config: RunConfig) -> tuple[str, ...]:
    """Returns the requirement of a stage that uses the final model: a stage that produces one."""
    return (final_model(config) or FIRST_TRAINING,)


def needed_start(config: RunConfig, stage: str) -> tuple[str, ...]:
    """Returns the requirement of a stage that continues the training of a model: an earlier stage that produces one."""
    return (model_before(config, stage) or FIRST_TRAINING,)
