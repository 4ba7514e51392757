"""Experience: completions with the values that updates need, split into minibatches over several epochs.

It is the same on all ranks, so that minibatches do not depend on the number of data ranks.

Reference model of a policy gradient: log-probabilities of completions under the initial weights of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.order import permutation
from modelwright.objectives.completion_rows import RowPlan, completion_batch
from modelwright.objectives.rollouts import Rollout, gather_rows, share
from modelwright.parallel.mesh import World
from modelwright.train.frozen_model import FrozenModel


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
    def of(cls, rollout: Rollout, extras_CT: Mapping[str, Tensor], metrics: Mapping[str, float]) -> "Experience":
        return cls(
            ids_CL=rollout.ids_CL,
            lengths_C=rollout.lens_C - 1,
            mask_CT=rollout.mask_CT,
            extras_CT=extras_CT,
            metrics=metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "extras_CT": dict(self.extras_CT), "metrics": dict(self.metrics)}


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

    @property
    def is_used_up(self) -> bool:
        return self.experience is None or self.position >= self.num_epochs * self.num_minibatches

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of the newest rollout."""
        return self.experience.metrics if self.experience else {}

    def fill(self, experience: Experience) -> None:
        """Start with the experience of the next rollout."""
        self.experience, self.position, self.number = experience, 0, self.number + 1

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

    def end(self) -> None:
        """Skip the remaining minibatches of this experience."""
        self.position = self.num_epochs * self.num_minibatches

    def state_dict(self) -> dict[str, Any]:
        experience = {"experience": self.experience.state_dict()} if self.experience else {}
        return {"number": self.number, "position": self.position, **experience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number, self.position = state["number"], state["position"]
        self.experience = Experience(**state["experience"]) if "experience" in state else None


def values_of_places(
    rollout: Rollout, world: World, row_len: int, compute: Callable[[TokenBatch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Runs `compute`, which returns values [B, row_len], on rows of the completions, and returns its values of places
    [C, T] on the CPU. Each rank computes a share; all ranks call together and get the values of all.
    """
    part = rollout.take(torch.tensor([*share(rollout.num_completions, world)], dtype=torch.int64))
    plan = RowPlan.of(part.lens_C - 1, row_len)
    # Equally many rows on all ranks, because a sharded model gathers its weights in each forward pass
    num_rows = max(1, int(world.maxima(plan.num_rows)[0]))
    values = compute(completion_batch(part.ids_CL, part.mask_CT, plan).padded(num_rows))
    num_places = rollout.log_probs_CT.shape[1]
    return {
        name: gather_rows(world, plan.taken(values_BT[: plan.num_rows].cpu(), num_places) * part.mask_CT)
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
