"""How a microbatch gets through the model and its gradient back, whole or in slices of its tokens.

A `Runner` is handed microbatches and a function that makes a loss of the model's output; gradients end up in the
parameters. Knows no normaliser and no update.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ContextAttention
from modelwright.parallel.context import attention_of
from modelwright.parallel.mesh import World
from modelwright.parallel.shard import scatter_gradients
from modelwright.train.objective import Batch

LossOf = Callable[[Tensor, Batch], Tensor]
"""The model's output and the rows (or the slice of them) that it belongs to -> a scalar to differentiate."""


class Runner(Protocol):
    """`loss_of` is called once for each microbatch, in order, on the ranks that hold the model's output."""

    model: Decoder
    """What this rank holds: its parameters under the names of the whole model."""

    def num_stages_with(self, name: str) -> int:
        """How many stages of a pipeline hold this parameter."""
        ...

    def train(self, parts: Sequence[Batch], loss_of: LossOf) -> None:
        """Forward and backward of all microbatches of a step."""
        ...

    def finish_gradients(self) -> None:
        """After the last backward: add up the gradients of a parameter that several stages hold."""
        ...

    def evaluate(self, parts: Sequence[Batch], loss_of: LossOf) -> None:
        """Forward only; call without gradients. All parts have the same number of rows on all ranks."""
        ...


class WholeModel:
    """The ranks of `context` share the tokens of each row; all layers are here.

    context_attention: how they attend to each other's tokens. scatters_each: gradients that FSDP divides are scattered
    after each microbatch (ZeRO-2 and 3), not once a step.
    """

    def __init__(
        self,
        model: Decoder,
        context: World,
        *,
        scatters_each: bool,
        context_attention: ContextAttention = "all_gather",
    ) -> None:
        self.model = model
        self.context = context
        self.context_attention: ContextAttention = context_attention
        self.scatters_each = scatters_each

    def num_stages_with(self, name: str) -> int:
        return 1

    def finish_gradients(self) -> None: ...

    def train(self, parts: Sequence[Batch], loss_of: LossOf) -> None:
        for number, part in enumerate(parts, start=1):
            scatter_gradients(self.model, self.scatters_each or number == len(parts))
            self._loss(part, loss_of).backward()

    def evaluate(self, parts: Sequence[Batch], loss_of: LossOf) -> None:
        for part in parts:
            self._loss(part, loss_of)

    def _loss(self, part: Batch, loss_of: LossOf) -> Tensor:
        attend, part = attention_of(part, self.context, self.context_attention)
        return loss_of(self.model(part.input_ids_BT, part.positions_BT, attend), part)
