"""The reference model of a policy gradient: log-probabilities of completions under the weights that training began
with."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.objectives.experience import values_of_places
from modelwright.objectives.rollouts import Rollout
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.whole_model import ModelLayout

ROWS_AT_ONCE = 16


@dataclass(kw_only=True)
class ReferenceModel:
    """A frozen model, loaded when it is first needed. Where the model in training is divided, so is this one, over all
    ranks; otherwise each rank has a copy.
    """

    load: Callable[[], Decoder]
    """The weights that training began with."""
    row_len: int
    """Tokens of a row; no completion with its prompt is longer."""
    loaded: list[FrozenModel] = field(default_factory=list[FrozenModel])

    def log_probs(self, rollout: Rollout, layout: ModelLayout) -> Tensor:
        """log p of each generated token [C, T] float32, 0 elsewhere. All ranks call together."""
        if not self.loaded:
            divided = not layout.mesh.is_only_data_parallel
            self.loaded.append(FrozenModel(self.load(), layout.world, sharded=divided))
        (model,) = self.loaded
        found = values_of_places(
            rollout,
            layout.world,
            self.row_len,
            lambda batch: {"log_probs": model.log_probs(batch, num_parts=-(-batch.num_rows // ROWS_AT_ONCE))},
        )
        return found["log_probs"].float()
