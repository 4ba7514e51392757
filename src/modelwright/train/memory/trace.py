"""The memory of a step: when each block was allocated, by which operator, and when it was freed; and an arena for all.

`StepTrace` sees every operator below autograd, and the death of every storage that an operator created (views of one
tensor are one storage). On real tensors it observes; on fake ones (`fake_model`), which have shapes and no values,
nothing is computed, so that a model of any size can be traced. Temporary memory inside a kernel is not visible. Only
what depends on weights is fake. Token ids, positions, masks and sums of losses are real and small, so the step's own
Python code runs as in training; where it asks a fake tensor for its value it gets 1.

`plan_arena` gives each tensor an offset, such that no two alive together overlap. Time counts operators; a tensor is
alive from its birth up to and including the moment before its death. Offsets by size: the largest tensor first, each
into the smallest gap between those that live when it does (Pisarchyk and Lee 2020, "Efficient Memory Management for
Deep Neural Net Inference", section 4.3: greedy by size, best fit), and by birth, as an allocator would have to; the
smaller arena wins. No arena can be smaller than the bytes alive at the peak.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["weights", "optimizer", "gradients", "activations", "temporary"]


KINDS: tuple[Kind, ...] = get_args(Kind)
"""activations: born in forward and still there when backward begins; temporary: all else that comes and goes."""


Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Lifetime of a block of memory, which any number of tensors may view. birth: number of the operator that allocated
    it; death: that of the operator before which it was freed, or the end of the step; operator and place: name of the
    allocating operator, and its place in the model.
    """

    num_bytes: int
    birth: int
    death: int
    kind: Kind
    operator: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.birth < self.death
        assert self.num_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The lifetimes of one step, from operator 0 up to `length`; phases: (first operator, phase), in order."""

    lifetimes: tuple[Lifetime, ...]
    length: int
    phases: tuple[tuple[int, Phase], ...] = ()

    def live_bytes(self, kind: Kind | None = None) -> list[int]:
        """Bytes alive at each operator, of one kind or of all."""
        # Differences at births and deaths, whose running sum is the bytes alive: linear in blocks and operators.
        changes = [0] * (self.length + 1)
        for one in self.lifetimes:
            if kind is None or one.kind == kind:
                changes[one.birth] += one.num_bytes
                changes[min(one.death, self.length)] -= one.num_bytes
        return list(accumulate(changes[: self.length]))

    @property
    def peak_time(self) -> int:
        """The first operator at which the most bytes are alive."""
        live = self.live_bytes()
        return max(range(len(live)), key=lambda time: live[time]) if live else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes(), default=0)

    def alive(self, time: int) -> list[Lifetime]:
        """The largest blocks alive, largest first."""
        result = [one for one in self.lifetimes if one.birth <= time < one.death]
        return sorted(result, key=lambda one: (-one.num_bytes, one.birth))

    def by_kind(self, time: int) -> Mapping[Kind, int]:
        """Returns the bytes alive of every kind."""
        alive = self.alive(time)
        return {kind: sum(one.num_bytes for one in alive if one.kind == kind) for kind in KINDS}

    def phase_at(self, time: int) -> Phase:
        result: Phase = "forward"
        for start, phase in self.phases:
            result = phase if start <= time else result
        return result

    @property
    def of_step(self) -> tuple[Lifetime, ...]:
        """Blocks allocated and freed within the step: all but weights and optimizer states."""
        return tuple(one for one in self.lifetimes if one.kind not in ("weights", "optimizer"))


LARGEST_REAL_BYTES = 2**20
"""Largest tensor that a traced step on fake tensors really allocates; larger ones are fake."""


def fake_model(make: Callable[[], nn.Module]) -> nn.Module:
    """The result of `make`, with fake parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make()


@dataclass
class _Block:
    """A storage; `death` is -1 until it is freed."""

    num_bytes: int
    birth: int
    operator: str
    place: str
    death: int = -1
    is_gradient: bool = False


class StepTrace(TorchDispatchMode):
    """Records operators and storages within its `with` block.

    Use: run all steps but the last, call `begin`, run the last one, read `timeline`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        parameter = next(iter(model.parameters()), None)
        self._fake = parameter.fake_mode if isinstance(parameter, FakeTensor) else None
        self._time = 0
        self._place = ""
        self._blocks: list[_Block] = []
        self._living: dict[int, tuple[_Block, weakref.ref[Any]]] = {}
        self._backward: list[bool] = []
        self._weights: set[int] = set()

    def begin(self) -> None:
        """Everything allocated so far existed before the step: weights, and the optimizer's states."""
        self._time, self._blocks, self._backward = 0, [], []
        for parameter in self._model.parameters():
            self._notice(parameter, "weight")
        self._weights = {id(self._living[_key(p)][0]) for p in self._model.parameters()}
        for block, _ in self._living.values():
            block.birth = 0
        self._blocks = [block for block, _ in self._living.values()]

    def timeline(self) -> MemoryTimeline:
        """The timeline since `begin`."""
        length = self._time + 1
        # Backward is the time in autograd's engine; the update comes after its last operator.
        last = max((time for time, inside in enumerate(self._backward, 1) if inside), default=len(self._backward))
        phases: list[tuple[int, Phase]] = [(0, "forward")]
        for time, inside in enumerate(self._backward, 1):
            phase: Phase = "backward" if inside else "update" if time > last else "forward"
            if phase != phases[-1][1]:
                phases.append((time, phase))
        starts = [time for time, phase in phases if phase == "backward"]
        lifetimes: list[Lifetime] = []
        for block in self._blocks:
            if not block.num_bytes:
                continue
            death = block.death if block.death >= 0 else length
            kind: Kind = "temporary"
            if id(block) in self._weights:
                kind = "weights"
            elif block.birth == 0 or block.death < 0:
                kind = "optimizer"  # outlives a step, as the weights do; states may be made anew by each update
            elif block.is_gradient:
                kind = "gradients"
            elif not self._backward[block.birth - 1] and any(block.birth < start < death for start in starts):
                kind = "activations"
            lifetimes.append(
                Lifetime(
                    num_bytes=block.num_bytes,
                    birth=block.birth,
                    death=max(death, block.birth + 1),
                    kind=kind,
                    operator=block.operator,
                    place=block.place,
                )
            )
        return MemoryTimeline(lifetimes=tuple(lifetimes), length=length, phases=tuple(phases))

    @contextmanager
    def places(self) -> Iterator[None]:
        """Within the block, modules report the step's place: the one running, and in backward the one that ran last."""

        def done(place: str, parameter: Tensor) -> None:
            self._place = place
            if parameter.grad is not None:
                known = self._living.get(_key(parameter.grad))
                if known is not None:
                    known[0].is_gradient = True

        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_place", name)))
        for name, parameter in self._model.named_parameters():
            place = name.rpartition(".")[0]
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(done, place)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)  # an attribute that only fake tensors are asked for here, not an operator
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A result in the memory of an argument is a view, and allocates nothing.
        given = {_key(tensor) for tensor in tensors}
        self._time += 1
        self._backward.append(torch._C._current_graph_task_id() != -1)  # -1 outside of autograd's engine
        # Values of fake tensors are 1; tensors created from nothing are fake only if they are large.
        result, reads_value = None, func is torch.ops.aten._local_scalar_dense.default
        if self._fake is not None and reads_value and any(isinstance(one, FakeTensor) for one in tensors):
            result = tensors[0].dtype == torch.bool or (1.0 if tensors[0].is_floating_point() else 1)
        elif self._fake is not None and not tensors:
            with self._fake:
                fake = func(*args, **kwargs)
            result = fake if isinstance(fake, Tensor) and fake.nbytes > LARGEST_REAL_BYTES else None
        if result is None:
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in given:
                self._notice(leaf, str(func).removeprefix("aten.").removesuffix(".default"))
        return result

    def _notice(self, tensor: Tensor, operator: str) -> None:
        key, storage = _key(tensor), tensor.untyped_storage()
        if key in self._living:
            return
        block = _Block(num_bytes=storage.nbytes(), birth=self._time, operator=operator, place=self._place)
        self._blocks.append(block)
        self._living[key] = block, weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        block, _ = self._living.pop(key)
        block.death = self._time + 1


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


ALIGNMENT = 64
"""Alignment of tensors in bytes, that of PyTorch's allocator on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The offset of each of `lifetimes`, in order, and the arena's size. live_bytes: the lower bound, which is the
    bytes alive at the peak, each tensor rounded up to the alignment.
    """

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    live_bytes: int

    @property
    def reuse_share(self) -> float:
        """Memory saved relative to an arena in which no two tensors share space, in [0, 1]."""
        total = sum(one.num_bytes for one in self.lifetimes)
        return 1.0 - self.num_bytes / total if total else 0.0

    @property
    def fragmentation(self) -> float:
        """The arena's share above the lower bound."""
        return 1.0 - self.live_bytes / self.num_bytes if self.num_bytes else 0.0


def plan_arena(lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT) -> Arena:
    """The smaller of the arenas planned by size and by birth."""
    sizes = np.array([-(-one.num_bytes // alignment) * alignment for one in lifetimes], dtype=np.int64)
    births, deaths = (np.array([getattr(one, name) for one in lifetimes], np.int64) for name in ("birth", "death"))
    orders = (np.lexsort((births, -sizes)), np.lexsort((-sizes, births)))
    result = [_place(sizes, births, deaths, order) for order in orders]
    offsets = min(result, key=lambda offsets: int((offsets + sizes).max(initial=0)))
    changes = np.zeros(int(deaths.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(changes, births, sizes)
    np.subtract.at(changes, deaths, sizes)
    return Arena(
        lifetimes=tuple(lifetimes),
        offsets=tuple(offsets.tolist()),
        num_bytes=int((offsets + sizes).max(initial=0)),
        live_bytes=int(changes.cumsum().max(initial=0)),
    )


def _place(sizes: np.ndarray, births: np.ndarray, deaths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Place each block into the smallest gap that it fits into among those placed before it, else on top."""
    offsets, placed = np.zeros_like(sizes), np.zeros(len(sizes), dtype=bool)
    for number in order:
        if not sizes[number]:
            continue
        near = placed & (births < deaths[number]) & (births[number] < deaths)
        placed[number] = True
        if not near.any():
            continue
        by_start = np.argsort(offsets[near], kind="stable")
        starts, ends = offsets[near][by_start], (offsets[near] + sizes[near])[by_start]
        # Blocks that live with this one may overlap each other, so a gap begins where all before it have ended.
        reached = np.maximum.accumulate(ends)
        before = np.concatenate(([0], reached[:-1]))
        gaps = starts - before
        fitting = np.flatnonzero(gaps >= sizes[number])
        offsets[number] = before[fitting[np.argmin(gaps[fitting])]] if len(fitting) else reached[-1]
    return offsets
