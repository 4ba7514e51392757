"""Which stage provides the tokenizer, the model that training starts from, and the run's final model."""

from modelwright.pipeline.config import RunConfig


def tokenizer_stage(config: RunConfig) -> str:
    """The stage whose artifact contains the tokenizer."""
    return "init" if config.init_from else "tokenize"


def model_before(config: RunConfig, stage: str) -> str:
    """The stage whose model training in `stage` starts from, "" for random weights."""
    trained = config.trained_stages
    place = trained.index(stage)
    return trained[place - 1] if place else ""


def final_model(config: RunConfig) -> str:
    """The stage whose model is the run's result, "" if the run trains none."""
    return config.trained_stages[-1] if config.trained_stages else ""
