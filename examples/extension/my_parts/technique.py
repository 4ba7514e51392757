# A technique: gradient centralization (Yong et al. 2020) takes the mean of each row from the gradients of matrices.
# modelwright run tiny --training.techniques.centralization.strength 0.5
# It says what it needs, so a layout that divides gradients is refused instead of being wrong in silence.
from dataclasses import dataclass

from modelwright.core.compatibility import WHOLE_GRADIENTS, WHOLE_MATRICES
from modelwright.core.config import ConfigError
from modelwright.train.outside import TechniqueSpec
from modelwright.train.technique import Runtime, Technique, Update


@dataclass(frozen=True, kw_only=True)
class CentralizationConfig:
    """Settings: checked, shown by `modelwright config`, and part of what identifies a run."""

    strength: float = 1.0
    """Share of the mean that is subtracted."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"strength: must be in [0, 1], got {self.strength}")


def centralization(config: CentralizationConfig, run: Runtime) -> Technique:
    def on_gradients(update: Update) -> None:
        for view in update.gradients:
            if view.tensor.dim() == 2:
                view.tensor.sub_(view.tensor.mean(dim=1, keepdim=True), alpha=config.strength)

    return Technique(name="centralization", on_gradients=on_gradients)


CENTRALIZATION = TechniqueSpec(
    build=centralization, config=CentralizationConfig, needs=frozenset({WHOLE_MATRICES, WHOLE_GRADIENTS})
)
