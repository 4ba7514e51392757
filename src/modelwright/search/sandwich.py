"""Training of shared weights by the sandwich rule (Yu and Huang 2019, Universally Slimmable Networks): each step trains
the largest, the smallest and some random sub-networks on the same rows.

It joins the loop of all trainings in two places. `Sandwich` is an objective whose batch has the rows once for each
sub-network, which become microbatches of their own; `sub_networks` builds the technique that runs each microbatch
through its sub-network in place of the whole model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from modelwright.data.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Attend, Decoder, Insert
from modelwright.precision.apply import ModelPrecision
from modelwright.search.subnetwork import subnetwork
from modelwright.train.objective import Objective, Terms
from modelwright.train.runtime import Runtime, TechniqueBuilder
from modelwright.train.technique import Technique

NETWORK = "network_B"
"""The extra of a batch that says which sub-network of the step a row belongs to."""

ShapesOfStep = Callable[[int], Sequence[ModelConfig]]
"""The sub-networks of a step, from its number: always equally many."""


@dataclass
class Turn:
    """Whose turn it is: shared by the objective, which has the loss, and the technique, which runs the model.

    microbatches: of each sub-network. number: microbatches of this step that have run. network: of the newest.
    """

    microbatches: int
    shapes: Sequence[ModelConfig] = ()
    number: int = 0
    network: Decoder | None = None


@dataclass
class Sandwich(Objective):
    """Learns what `inner` learns, with every sub-network of a step on the same rows; losses are means over them."""

    inner: Objective
    shapes: ShapesOfStep
    num_networks: int
    turn: Turn = field(default_factory=lambda: Turn(microbatches=1))

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in self.inner.batches(model, first=first, rank=rank, world_size=world_size):
            yield repeated(batch, self.num_networks)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        """By the head of the sub-network that made `output`; the whole model's for held-out rows."""
        if NETWORK not in batch.extras:
            return self.inner.losses(output, batch, model)
        number = (self.turn.number - 1) // self.turn.microbatches
        assert bool((batch.extras[NETWORK] == number).all()), "a microbatch met the sub-network of another"
        assert self.turn.network is not None
        return self.inner.losses(output, batch, self.turn.network)


def repeated(batch: TokenBatch, times: int) -> TokenBatch:
    """All rows so many times, one copy after the other, with the number of its copy for each row."""

    def tiled(values: Tensor) -> Tensor:
        return values.repeat(times, *[1] * (values.dim() - 1))

    numbers_B = torch.arange(times).repeat_interleave(batch.num_rows)
    return replace(
        batch,
        input_ids_BT=tiled(batch.input_ids_BT),
        labels_BT=tiled(batch.labels_BT),
        positions_BT=tiled(batch.positions_BT),
        segments_BT=tiled(batch.segments_BT),
        extras={**{name: tiled(values) for name, values in batch.extras.items()}, NETWORK: numbers_B},
    )


def sub_networks(sandwich: Sandwich) -> TechniqueBuilder:
    """The technique that runs the microbatches of a step through the step's sub-networks, in their order. Without
    gradients, in evaluation, the whole model runs.
    """

    def build(run: Runtime) -> Technique:
        model, turn, whole = run.model, sandwich.turn, run.model.forward
        precision = run.formats.config

        def forward(
            tokens_BT: Tensor,
            positions_BT: Tensor,
            attend: Attend,
            lengths_BT: Tensor | None = None,
            insert: Insert | None = None,
        ) -> Tensor:
            if not torch.is_grad_enabled():
                return whole(tokens_BT, positions_BT, attend, lengths_BT, insert)
            network = subnetwork(model, turn.shapes[turn.number // turn.microbatches])
            ModelPrecision(network, precision)  # formats are set on layers, and these are new
            turn.network, turn.number = network, turn.number + 1
            return network(tokens_BT, positions_BT, attend, lengths_BT, insert)

        def on_batch(step: int, batch: TokenBatch) -> TokenBatch:
            turn.shapes, turn.number = sandwich.shapes(step), 0
            return batch

        def on_retry() -> None:
            turn.number = 0

        model.forward = forward  # found before the class's own
        run.on_exit.callback(lambda: vars(model).pop("forward"))
        return Technique(name="sub_networks", on_batch=on_batch, on_retry=on_retry)

    return build
