"""Reference model of a policy gradient: log-probabilities of completions under the initial weights of training."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from modelwright.objectives.experience import values_of_places
from modelwright.objectives.rollouts import Rollout
from modelwright.parallel.mesh import World
from modelwright.train.frozen_model import FrozenModel

ROWS_AT_ONCE = 16


@dataclass(kw_only=True)
class ReferenceModel:
    """A frozen model, loaded when it is first needed."""

    load: Callable[[], FrozenModel]
    """Loads the model with the initial weights of training; all ranks call together."""
    row_len: int
    """Tokens of a row, at least those of the longest completion with its prompt."""
    loaded: list[FrozenModel] = field(default_factory=list[FrozenModel])

    def log_probs(self, rollout: Rollout, world: World) -> Tensor:
        """Log-probability of each generated token [C, T] float32, 0 elsewhere. All ranks of `world` call together."""
        if not self.loaded:
            self.loaded.append(self.load())
        (model,) = self.loaded
        found = values_of_places(
            rollout,
            world,
            self.row_len,
            lambda batch: {"log_probs": model.log_probs(batch, num_parts=-(-batch.num_rows // ROWS_AT_ONCE))},
        )
        return found["log_probs"].float()
