"""Common base of objectives that generate completions and learn from each rollout in several updates."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.examples import prompt_numbers
from modelwright.model.decoder import Decoder
from modelwright.objectives.experience import Experience, ExperienceBuffer, ReferenceModel
from modelwright.objectives.heldout_rewards import HeldoutRewards
from modelwright.objectives.rollouts import Rollout, RolloutWorker, constant_metrics, shown
from modelwright.train.objective import Metric, ModelLayout, Objective, one_process


@dataclass(kw_only=True)
class RolloutObjective(Objective):
    """Fills a buffer with the experience of a rollout whenever it is used up, and yields its minibatches."""

    needs = frozenset({EQUAL_REPLICAS, SYNCHRONOUS_UPDATES})
    worker: RolloutWorker
    heldout: HeldoutRewards
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
            if self.buffer.is_used_up:
                self.buffer.fill(self.new_experience(model))
            yield self.buffer.next_minibatch(rank=rank, world_size=world_size)

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
    ) -> Rollout:
        """Generate completions of the next prompts. more: number of this round, in a rollout with several."""
        worker = self.worker
        numbers = prompt_numbers(self.next_place, num_prompts, num_prompts=len(worker.prompts), seed=worker.seed)
        self.next_place += num_prompts
        # Named by the rollout that fills the buffer next, so that a resumed run draws the same tokens
        stream = ("rollout", self.buffer.number + 1, *more)
        return worker.roll_out(model, self.layout.world, numbers, num_generations=num_generations, stream=stream)

    def show(self, rollout: Rollout) -> None:
        """Pass some completions to `observe`."""
        if self.layout.world.is_first:
            count = self.worker.config.shown_completions
            self.observe(self.buffer.number + 1, shown(rollout, self.worker, count))

    def constant_metrics(self, output: Tensor, *, with_rollout: bool) -> dict[str, Metric]:
        """Returns all metrics without values, except for the newest rollout's figures if `with_rollout`."""
        nothing = constant_metrics({}, self.metric_names, output.device)
        figures = self.buffer.metrics if with_rollout else {}
        return {**nothing, **constant_metrics(figures, list(figures), output.device)}
