"""Local SGD: ranks train independently and synchronize after a number of updates (DiLoCo, Douillard et al. 2023).

At a synchronization each rank's displacement since the last one, `start - now`, is a pseudo-gradient. Its mean over the
ranks, sent by any gradient sync (exact, INT8, top-k as in SparseLoCo), moves the common start by SGD with Nesterov
momentum, and all ranks continue from there. With rate 1 and momentum 0 that is plain averaging of weights. The last
synchronization is exact and a plain mean.

`SharedMoment` averages Adam's second moment for a small part of the bytes. A rank estimates it from its own share of a
batch alone. A gradient that only this rank saw then inflates its own denominator and shrinks its own step: the mean of
the ranks' steps is no longer the step of their mean gradient. By measurement this costs local steps more than
sparsification does. With one denominator on all ranks the mean of the steps is linear in the gradients again, which
makes error feedback sound (1-bit Adam, Tang et al. 2021, freezes the moment for that; 0/1 Adam, Lu et al. 2022,
refreshes it seldom). Moments change slowly and span many magnitudes, so a rank sends the number of steps of `octaves`
by which each has changed, in log2, since the last agreement: small integers, alike within a matrix's rows and columns
(Adafactor, Shazeer and Stern 2018, keeps nothing else of them), so that what these leave takes few bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelwright.core.config import ConfigError, constant
from modelwright.ops.dtensor import TensorView, local
from modelwright.ops.sparse_codec import decode_moves, encode_moves
from modelwright.parallel.codecs.topk_quantized import gather_bytes
from modelwright.parallel.gradient_sync import AllReduceSync, GradientSync, flatten, shaped, write_back
from modelwright.parallel.mesh import World
from modelwright.parallel.strategy import Replica, Strategy, Unscale

FLOOR = 1e-16
"""Smallest moment that is sent: its root is Adam's usual epsilon."""
_NOTHING = torch.zeros(0, dtype=torch.uint8)


@dataclass(eq=False)
class SharedMoment:
    """The mean of the ranks' second moments, to within half a step of each other rank's part; the own part is exact.

    `bytes_sent` is counted as in `TopKQuantizedSync`. Non-finite moments on any rank leave all of them unchanged.
    agreed: log2 of the values known to all ranks, empty before the first synchronization; part of a checkpoint.
    """

    world: World
    octaves: float = 1.0
    agreed: list[Tensor] = field(default_factory=list[Tensor])
    bytes_sent: int = 0

    def share(self, moments: Sequence[Tensor]) -> None:
        """Replaces the moments, in one order on all ranks, by their mean; empty until a step has created any."""
        if self.world.size == 1 or not moments:
            return
        own_N = flatten(moments).clamp_min_(FLOOR)
        agreed_N = (flatten(self.agreed) if self.agreed else torch.zeros_like(own_N)).to(own_N.device)
        finite = bool(own_N.isfinite().all())
        moves_N = ((own_N.log2() - agreed_N) / self.octaves).round()
        message = encode_matrices(shaped(moves_N, moments)) if finite else _NOTHING
        messages, sent = gather_bytes(self.world, message)
        self.bytes_sent += sent
        if not all(len(message) for message in messages):
            return
        total_N, known_N = torch.zeros_like(own_N), own_N
        # In rank order: `agreed` must have the same bits on all ranks.
        for rank, message in enumerate(messages):
            moves_N = decode_matrices(message, moments).to(own_N.device)
            part_N = torch.exp2(agreed_N + moves_N * self.octaves)
            total_N += part_N
            known_N = part_N if rank == self.world.rank else known_N
        # This rank's exact moments take the place of the rounded ones that the others know.
        write_back((total_N - known_N + own_N) / self.world.size, moments)
        self.agreed = shaped((total_N / self.world.size).log2(), moments)


def encode_matrices(moves: Sequence[Tensor]) -> Tensor:
    """Encodes integers, given in FP32, as bytes [uint8, on the CPU]: the length of the next part (4 bytes), rounded
    means of rows and then of what they leave of columns, and what both leave.
    """
    means: list[Tensor] = []
    rest: list[Tensor] = []
    for part in moves:
        left_RC = _as_matrix(part)
        for dim in (1, 0):
            means.append((left_RC.sum(dim, keepdim=True) / max(1, left_RC.shape[dim])).round())
            left_RC = left_RC - means[-1]
        rest.append(left_RC)
    first, second = (torch.from_numpy(encode_moves(flatten(parts).cpu().numpy())) for parts in (means, rest))
    length = torch.tensor([*len(first).to_bytes(4, "little")], dtype=torch.uint8)
    return torch.cat([length, first, second])


def decode_matrices(message: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Decodes `encode_matrices` of tensors with the shapes of `like`, FP32 [N], on the CPU."""
    shapes = [_as_matrix(tensor).shape for tensor in like]
    first = 4 + int.from_bytes(message[:4].tolist(), "little")
    sizes = [size for shape in shapes for size in shape]
    means = torch.from_numpy(decode_moves(message[4:first].numpy(), sum(sizes))).split(sizes)
    moves_N = torch.from_numpy(decode_moves(message[first:].numpy(), sum(shape.numel() for shape in shapes)))
    for part_RC, rows, columns in zip(
        moves_N.split([shape.numel() for shape in shapes]), means[::2], means[1::2], strict=True
    ):
        part_RC.view(len(rows), len(columns)).add_(rows[:, None]).add_(columns)
    return moves_N


def _as_matrix(tensor: Tensor) -> Tensor:
    """Vectors are one column, so that their values pass for means of rows."""
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1) if tensor.numel() else tensor.reshape(0, 1)


Private = Mapping[str, Sequence[Tensor]]
SECOND_MOMENT = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT, "momentum_buffer")
"""Optimizer states of AdamW, Lion and Muon that have a parameter's shape."""


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig:
    """Settings of local SGD: ranks update independently and average periodically (DiLoCo, Douillard et al. 2023)."""

    sync_every_steps: int = 0
    """Updates between synchronizations; 0 averages gradients at every update instead."""
    outer_lr: float = constant(1.0)
    """Learning rate of the outer Nesterov SGD; 1 with momentum 0 averages the weights."""
    outer_momentum: float = constant(0.0)
    """Momentum of the outer SGD."""
    keep_residual: bool = constant(False)
    """Keep the residual of compression in this rank's own weights; otherwise all ranks continue from equal weights."""
    sync_second_moment_every: int = constant(0)
    """Synchronizations of the weights per synchronization of AdamW's second moment; 0 for never."""
    moment_octaves: float = constant(1.0)
    """Quantization step, in powers of two, in which the second moment is sent."""

    def __post_init__(self) -> None:
        if self.sync_every_steps < 0:
            raise ConfigError(
                f"sync_every_steps: must not be negative, got {self.sync_every_steps}; 0 disables local steps"
            )
        if self.outer_lr <= 0:
            raise ConfigError(f"outer_lr: must be above 0, got {self.outer_lr}; 1 with momentum 0 averages the weights")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"outer_momentum: must be in [0, 1), got {self.outer_momentum}")
        if self.sync_second_moment_every < 0:
            raise ConfigError(
                f"sync_second_moment_every: must not be negative, got {self.sync_second_moment_every}; 0 disables it"
            )
        if self.moment_octaves <= 0:
            raise ConfigError(
                f"moment_octaves: must be above 0, got {self.moment_octaves}; 1 is a factor of 2 per step"
            )


class OuterStep:
    """Synchronizes one rank's weights with those of the other ranks.

    The strategy calls `begin` once, before its first step, and `after_update` after every update, with this rank's
    parameters in one order on all ranks. Between synchronizations the ranks' weights and optimizer states differ, so
    the state holds them; under another number of ranks each starts with the mean of the old ones.
    """

    def __init__(self, world: World, transport: GradientSync, config: LocalSgdConfig) -> None:
        assert config.sync_every_steps > 0
        self.world = world
        self.transport = transport
        self.config = config
        self.num_steps = 0
        self.start: list[Tensor] = []
        self.momentum: list[Tensor] = []
        self._origin: list[Tensor] = []
        self._last = AllReduceSync(world)
        self._moment = SharedMoment(world, config.moment_octaves)
        self._parameters: list[Tensor] = []
        self._private: Callable[[], Private] = dict
        self._loaded: dict[str, Any] = {}

    @property
    def bytes_sent(self) -> int:
        return self.transport.bytes_sent + self._moment.bytes_sent + self._last.bytes_sent

    def begin(
        self,
        parameters: Sequence[Tensor],
        *,
        num_steps: int,
        private: Callable[[], Private] = dict,
        restore: Callable[[Private], object] | None = None,
    ) -> None:
        """Records the ranks' start, or returns to that of the loaded state.

        num_steps: steps of the whole run; the ranks synchronize after the last one in any case. private: tensors of
        this rank alone, lists in the parameters' order and shapes (the optimizer's moments). restore, required with
        `private`: writes such tensors back if a state saved between synchronizations is loaded; the trainer has
        restored the first rank's by then.
        """
        self.num_steps = num_steps
        self._parameters, self._private = [parameter.detach() for parameter in parameters], private
        loaded, self._loaded = self._loaded, {}
        if not self.start:
            self.start = [parameter.float().clone() for parameter in self._parameters]
        self.start = [start.to(now.device) for start, now in zip(self.start, self._parameters, strict=True)]
        # States of another number of ranks come as their sum over ours: the mean of n values is (m / n) of that.
        scale = self.world.size / loaded["shared"]["num_ranks"] if loaded else 1.0
        if loaded.get("weights"):
            for parameter, value in zip(self._parameters, loaded["weights"], strict=True):
                parameter.copy_(value if scale == 1.0 else value * scale)
        if loaded.get("private"):
            assert restore is not None, "private tensors were saved that nobody restores"
            restore({name: [one * scale for one in tensors] for name, tensors in loaded["private"].items()})
        self._origin = self._own_start()

    def after_update(self, parameters: Sequence[Tensor], step: int) -> None:
        """Synchronizes if it is time. step: updates done, from 1."""
        if step % self.config.sync_every_steps and step != self.num_steps:
            return
        weights = [parameter.detach() for parameter in parameters]
        # The displacement is sent, not a gradient: dividing by the ranks turns the transport's sum into the mean.
        moved = [
            (before - now.float()).div_(self.world.size) for before, now in zip(self._origin, weights, strict=True)
        ]
        if step == self.num_steps:
            # The run ends with the exact mean of the ranks' weights, so the residual, which no later message would
            # carry, is added here. A transport without residuals has an empty list.
            unsent = self.transport.state_dict().get("residuals", [])
            for part, left in zip(moved, unsent, strict=False):
                part.add_(left.to(part.device))
            self._last.reduce(moved)
            torch._foreach_sub_(self.start, moved)  # pyright: ignore
            torch._foreach_copy_(weights, self.start)  # pyright: ignore
            return
        self.transport.reduce(moved)
        # Nesterov momentum (Sutskever et al. 2013) in the form of `torch.optim.SGD`.
        if factor := self.config.outer_momentum:
            before = self.momentum or [torch.zeros_like(part) for part in moved]
            self.momentum = [old.to(part.device) * factor + part for old, part in zip(before, moved, strict=True)]
            moved = [part + factor * old for part, old in zip(moved, self.momentum, strict=True)]
        for start, taken in zip(self.start, moved, strict=True):
            start.sub_(taken, alpha=self.config.outer_lr)
        self._origin = self._own_start()
        torch._foreach_copy_(weights, self._origin)  # pyright: ignore
        every = self.config.sync_every_steps * self.config.sync_second_moment_every
        if every and step % every == 0:
            self._moment.share(self._private().get(SECOND_MOMENT, []))

    def _own_start(self) -> list[Tensor]:
        """Weights from which this rank continues: the common start, plus its own unsent displacement if it is kept."""
        unsent = self.transport.state_dict().get("residuals", []) if self.config.keep_residual else []
        if not unsent:
            return [start.clone() for start in self.start]
        # The residual was divided by the number of ranks, like the displacement, of which the outer step takes this.
        scale = self.world.size * self.config.outer_lr
        return [start.sub(left.to(start.device), alpha=scale) for start, left in zip(self.start, unsent, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "shared": {
                "start": list(self.start),
                "momentum": list(self.momentum),
                "agreed": list(self._moment.agreed),
                "num_ranks": self.world.size,
            },
            "weights": [parameter.float() for parameter in self._parameters],
            "private": {name: list(tensors) for name, tensors in self._private().items()},
            "transport": self.transport.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = [tensor.float() for tensor in state["shared"]["start"]]
        self.momentum = [tensor.float() for tensor in state["shared"]["momentum"]]
        self._moment.agreed = [tensor.float() for tensor in state["shared"].get("agreed", [])]
        self.transport.load_state_dict(state["transport"])
        self._loaded = state


class LocalSgd(Strategy):
    """Every rank updates its own weights; `OuterStep` synchronizes them."""

    needs = frozenset[str]()

    def __init__(self, replica: Replica, local_steps: OuterStep) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self.local_steps = local_steps

    def begin(self, step: int, num_steps: int) -> None:
        self.local_steps.begin(
            self._weights(), num_steps=num_steps, private=self._moments, restore=self._restore_moments
        )

    def reduce_gradients(self, unscale: Unscale) -> list[TensorView]:
        """Sends nothing: n times the local share replaces the sum over n ranks, so that clipping keeps its scale."""
        gradients = self.replica.gradients()
        shards = [local(gradient) for gradient in gradients]
        unscale(shards)
        if self.local_steps.world.size > 1:
            torch._foreach_mul_(shards, float(self.local_steps.world.size))  # pyright: ignore
        return self.replica.views_of(gradients)

    def grad_norm(self, gradients: list[Tensor]) -> float:
        """The root mean square of the ranks' norms, so that all of them clip by one factor."""
        norm, ranks = float(self.replica.norm(gradients)), self.mesh.reduce
        return math.sqrt(ranks.sums([norm * norm])[0] / ranks.size)

    def optimizer_step(self) -> None:
        self.replica.optimizer.step()

    def after_step(self, step: int) -> None:
        self.local_steps.after_update(self._weights(), step + 1)

    def replicated(self) -> Mapping[str, Tensor]:
        """The weights at the last synchronization."""
        shard = f"{self.mesh.pipeline.rank}/{self.mesh.shard.rank}/{self.mesh.tensor.rank}"
        return {f"start/{shard}/{number}": start for number, start in enumerate(self.local_steps.start)}

    def state_dict(self) -> dict[str, Any]:
        return self.local_steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.local_steps.load_state_dict(state)

    def _weights(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self.replica.names]

    def _moments(self) -> dict[str, list[Tensor]]:
        """Moments by name, like the parameters; zeros where an update does not use one. Empty before the first step."""
        states = [self.replica.optimizer.state.get(parameter, {}) for parameter in self.replica.names]
        return {
            name: [
                local(state[name]) if name in state else torch.zeros_like(weight)
                for state, weight in zip(states, self._weights(), strict=True)
            ]
            for name in MOMENTS
            if any(name in state for state in states)
        }

    def _restore_moments(self, moments: Mapping[str, Sequence[Tensor]]) -> None:
        optimizer = self.replica.optimizer
        for i, parameter in enumerate(self.replica.names):
            state = dict(optimizer.state.get(parameter, {}))
            for name, values in moments.items():
                if name in state:
                    local(state[name]).copy_(values[i])
            # Optimizers with states in fewer bits pack them again when they are set.
            if state:
                optimizer.state[parameter] = state
