"""Experience: completions as rows of tokens with the values that updates need, split into minibatches over several
epochs; and the common base of the objectives that learn from it. It is the same on all ranks, so that minibatches do
not depend on the number of data ranks.

Legend: C completions, T places of a completion (place t predicts token t + 1, so that a sequence of n tokens has n - 1
places), B rows, R tokens of a row.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.core.config import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.examples import prompt_numbers
from modelwright.data.rows.order import permutation
from modelwright.data.rows.pack import best_fit
from modelwright.model.decoder import Decoder
from modelwright.objectives import rollouts
from modelwright.parallel.mesh import World
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import Metric, ModelLayout, Objective, one_process


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Location of each of C completions: in `rows` [C], from `starts` [C] on, over `lengths` [C] tokens."""

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    num_rows: int
    row_len: int

    @classmethod
    def of(cls, lengths_C: Tensor, row_len: int) -> "RowPlan":
        """Packs completions into rows of `row_len` tokens by best fit, longest first; none is longer than a row."""
        lengths = np.array(lengths_C.tolist(), dtype=np.int64)
        rows = best_fit(lengths, row_len) if len(lengths) else lengths
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        used, starts = [0] * num_rows, list[int]()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            starts.append(used[row])
            used[row] += length
        return cls(rows=rows.tolist(), starts=starts, lengths=lengths.tolist(), num_rows=num_rows, row_len=row_len)

    def placed(self, values_CT: Tensor, empty: int | float = 0) -> Tensor:
        """Scatters the values of completions to their rows [B, R]; `empty` elsewhere."""
        values_BR = torch.full((self.num_rows, self.row_len), empty, dtype=values_CT.dtype)
        for values_T, row, start, length in zip(values_CT, self.rows, self.starts, self.lengths, strict=True):
            values_BR[row, start : start + length] = values_T[:length]
        return values_BR

    def taken(self, values_BR: Tensor, num_places: int) -> Tensor:
        """Gathers the values of completions from rows [C, T], T = `num_places`; 0 past the end of a completion."""
        values_CT = values_BR.new_zeros(len(self.rows), num_places)
        for number, (row, start, length) in enumerate(zip(self.rows, self.starts, self.lengths, strict=True)):
            values_CT[number, :length] = values_BR[row, start : start + length]
        return values_CT


def completion_batch(
    ids_CL: Tensor, mask_CT: Tensor, plan: RowPlan, extras_CT: Mapping[str, Tensor] | None = None
) -> TokenBatch:
    """Builds the rows for a forward pass over completions.

    ids_CL: int64, prompts with completions, L = T + 1; mask_CT: bool, the places that predict a token of the
    completion, which get labels; extras_CT: further values of places, by their names without the shape: `advantages`
    becomes the extra `advantages_BT`.
    """
    places_CT = torch.arange(mask_CT.shape[1]).expand_as(mask_CT)
    # Completions are numbered within their row, in the order of the plan
    counts, numbers = [0] * plan.num_rows, list[int]()
    for row in plan.rows:
        numbers.append(counts[row])
        counts[row] += 1
    segments = torch.tensor(numbers, dtype=torch.int32)
    return TokenBatch(
        input_ids_BT=plan.placed(ids_CL[:, :-1]),
        labels_BT=plan.placed(ids_CL[:, 1:].where(mask_CT, IGNORED), IGNORED),
        positions_BT=plan.placed(places_CT),
        segments_BT=plan.placed(segments[:, None].expand_as(mask_CT), -1),
        extras={f"{name}_BT": plan.placed(values) for name, values in (extras_CT or {}).items()},
    )


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Completions that are trained on, with values for their places.

    Legend: C completions, L tokens of the longest one with its prompt, T = L - 1 places.
    """

    ids_CL: Tensor
    """int64, prompt and completion."""
    lengths_C: Tensor
    """int64, places of prompt and completion."""
    mask_CT: Tensor
    """bool, the places that predict a generated token."""
    extras_CT: Mapping[str, Tensor]
    """Values of places, by the name of a batch's extra without its shape."""
    metrics: Mapping[str, float]
    """Figures of the rollout."""

    @classmethod
    def of(
        cls, rollout: rollouts.Rollout, extras_CT: Mapping[str, Tensor], metrics: Mapping[str, float]
    ) -> "Experience":
        return cls(
            ids_CL=rollout.ids_CL,
            # The last token predicts nothing
            lengths_C=rollout.lens_C - 1,
            mask_CT=rollout.mask_CT,
            extras_CT=extras_CT,
            metrics=metrics,
        )


@dataclass(kw_only=True)
class ExperienceBuffer:
    """Yields minibatches of the newest experience: in each of `num_epochs` epochs all completions once, in a new random
    order, in `num_minibatches` parts."""

    num_epochs: int
    num_minibatches: int
    row_len: int
    seed: int
    experience: Experience | None = None
    number: int = -1
    """Number of the newest rollout, from 0."""
    position: int = 0
    """Number of its minibatches that were returned."""

    def next_minibatch(self, *, rank: int, world_size: int) -> TokenBatch:
        """Returns this data rank's part of the next minibatch, packed into rows, at least one."""
        experience = self.experience
        assert experience is not None
        epoch, part = divmod(self.position, self.num_minibatches)
        self.position += 1
        order = permutation(derive_seed(self.seed, "minibatches", self.number, epoch), len(experience.lengths_C))
        # Divided into minibatches before ranks, so that a minibatch is the same for any number of ranks
        own = torch.from_numpy(np.array_split(np.array_split(order, self.num_minibatches)[part], world_size)[rank])
        plan = RowPlan.of(experience.lengths_C[own], self.row_len)
        extras_CT = {name: values[own] for name, values in experience.extras_CT.items()}
        return completion_batch(experience.ids_CL[own], experience.mask_CT[own], plan, extras_CT).padded(1)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"number": self.number, "position": self.position}
        if one := self.experience:
            state["experience"] = {**vars(one), "extras_CT": dict(one.extras_CT), "metrics": dict(one.metrics)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number, self.position = state["number"], state["position"]
        self.experience = Experience(**state["experience"]) if "experience" in state else None


def values_of_places(
    rollout: rollouts.Rollout, world: World, row_len: int, compute: Callable[[TokenBatch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Runs `compute`, which returns values [B, row_len], on rows of the completions, and returns its values of places
    [C, T] on the CPU. Each rank computes a share; all ranks call together and get the values of all.
    """
    part = rollout.take(torch.tensor([*rollouts.share(rollout.num_completions, world)], dtype=torch.int64))
    plan = RowPlan.of(part.lens_C - 1, row_len)
    # Equally many rows on all ranks, because a sharded model gathers its weights in each forward pass
    num_rows = max(1, int(world.maxima(plan.num_rows)[0]))
    values = compute(completion_batch(part.ids_CL, part.mask_CT, plan).padded(num_rows))
    num_places = rollout.log_probs_CT.shape[1]
    return {
        name: rollouts.gather_rows(world, plan.taken(values_BT[: plan.num_rows].cpu(), num_places) * part.mask_CT)
        for name, values_BT in values.items()
    }


ROWS_AT_ONCE = 16


@dataclass(kw_only=True)
class ReferenceModel:
    """A frozen model, loaded when it is first needed."""

    load: Callable[[], FrozenModel]
    """Loads the model with the initial weights of training; all ranks call together."""
    row_len: int
    """Tokens of a row, at least those of the longest completion with its prompt."""
    loaded: list[FrozenModel] = field(default_factory=list[FrozenModel])

    def log_probs(self, rollout: rollouts.Rollout, world: World) -> Tensor:
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


@dataclass(kw_only=True)
class RolloutObjective(Objective):
    """Fills a buffer with the experience of a rollout whenever it is used up, and yields its minibatches."""

    needs = frozenset({EQUAL_REPLICAS, SYNCHRONOUS_UPDATES})
    worker: rollouts.RolloutWorker
    heldout: rollouts.HeldoutRewards
    reference: ReferenceModel
    num_completions: int
    """Completions of one update."""
    row_len: int
    """Tokens of a row."""
    observe: Callable[[int, Sequence[Mapping[str, Any]]], None] = lambda number, samples: None
    """Called on the first rank with the number of each rollout and some of its completions."""
    layout: ModelLayout = field(default_factory=one_process)
    next_place: int = 0
    """Number of prompts used so far, in their endless random order."""
    buffer: ExperienceBuffer = field(init=False)

    @abstractmethod
    def new_experience(self, model: Decoder) -> Experience:
        """Roll out, and compute the values that updates need. All ranks call together."""

    def new_buffer(self, *, num_epochs: int, num_minibatches: int) -> ExperienceBuffer:
        return ExperienceBuffer(
            num_epochs=num_epochs, num_minibatches=num_minibatches, row_len=self.row_len, seed=self.worker.seed
        )

    def begin(self, layout: ModelLayout) -> None:
        self.layout = layout

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for _ in itertools.count(first):
            # Before the test: it may end the rollout because of the update that has just been made
            self.before_minibatch()
            buffer = self.buffer
            if buffer.experience is None or buffer.position >= buffer.num_epochs * buffer.num_minibatches:
                buffer.experience, buffer.position, buffer.number = self.new_experience(model), 0, buffer.number + 1
            yield buffer.next_minibatch(rank=rank, world_size=world_size)

    def before_minibatch(self) -> None:
        """May end the current rollout. All ranks call together, after the same updates."""

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.heldout.prepare(batch, model, self.layout)

    def state_dict(self) -> dict[str, Any]:
        parts = {"buffer": self.buffer.state_dict(), "heldout": self.heldout.state_dict()}
        return {"next_place": self.next_place, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_place = state["next_place"]
        self.buffer.load_state_dict(state["buffer"])
        self.heldout.load_state_dict(state["heldout"])

    def roll_out(
        self, model: Decoder, num_prompts: int, *, num_generations: int, more: tuple[int, ...] = ()
    ) -> rollouts.Rollout:
        """Generate completions of the next prompts. more: number of this round, in a rollout with several."""
        worker = self.worker
        numbers = prompt_numbers(self.next_place, num_prompts, num_prompts=len(worker.prompts), seed=worker.seed)
        self.next_place += num_prompts
        # Named by the rollout that fills the buffer next, so that a resumed run draws the same tokens
        stream = ("rollout", self.buffer.number + 1, *more)
        return worker.roll_out(model, self.layout.world, numbers, num_generations=num_generations, stream=stream)

    def show(self, rollout: rollouts.Rollout) -> None:
        """Pass some completions to `observe`."""
        if self.layout.world.is_first:
            count = self.worker.config.shown_completions
            self.observe(self.buffer.number + 1, rollouts.shown(rollout, self.worker, count))

    def constant_metrics(self, output: Tensor, *, with_rollout: bool) -> dict[str, Metric]:
        """Returns all metrics without values, except for the newest rollout's figures if `with_rollout`."""
        nothing = rollouts.constant_metrics({}, self.metric_names, output.device)
        newest = self.buffer.experience
        figures = newest.metrics if with_rollout and newest else {}
        return {**nothing, **rollouts.constant_metrics(figures, list(figures), output.device)}
