"""Traces a step: when each block of memory was allocated, by which operator, and when it was freed.

`StepTrace` sees every operator below autograd, and the death of every storage that an operator created (views of one
tensor are one storage). On real tensors it observes; on fake ones (`fake_model`), which have shapes and no values,
nothing is computed, so that a model of any size can be traced. Temporary memory inside a kernel is not visible.

Only what depends on weights is fake. Token ids, positions, masks and sums of losses are real and small, so the step's
own Python code runs as in training; where it asks a fake tensor for its value it gets 1.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelwright.train.memory.step_arena import Kind, Lifetime, MemoryTimeline, Phase

LARGEST_REAL_BYTES = 2**20
"""Largest tensor that a traced step on fake tensors really allocates; larger ones are fake."""


@dataclass
class _Block:
    """A storage; `death` is -1 until it is freed."""

    num_bytes: int
    birth: int
    operator: str
    place: str
    death: int = -1
    is_gradient: bool = False


def fake_model(make: Callable[[], nn.Module]) -> nn.Module:
    """The result of `make`, with fake parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make()


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
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
        for name, parameter in self._model.named_parameters():
            place = name.rpartition(".")[0]
            hooks.append(parameter.register_post_accumulate_grad_hook(lambda p, place=place: self._done(p, place)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A result in the memory of an argument is a view, and allocates nothing.
        given = {_key(tensor) for tensor in tensors}
        self._time += 1
        self._backward.append(torch._C._current_graph_task_id() != -1)  # -1 outside of autograd's engine
        result = self._run(func, args, kwargs, tensors)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in given:
                self._notice(leaf, str(func).removeprefix("aten.").removesuffix(".default"))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Values of fake tensors are 1; tensors created from nothing are fake only if they are large."""
        if self._fake is None:
            return func(*args, **kwargs)
        if any(isinstance(one, FakeTensor) for one in tensors):
            if func is torch.ops.aten._local_scalar_dense.default:
                return tensors[0].dtype == torch.bool or (1.0 if tensors[0].is_floating_point() else 1)
            return func(*args, **kwargs)
        if not tensors:
            with self._fake:
                fake = func(*args, **kwargs)
            if isinstance(fake, Tensor) and fake.nbytes > LARGEST_REAL_BYTES:
                return fake
        return func(*args, **kwargs)

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

    def _enter(self, name: str) -> None:
        self._place = name

    def _done(self, parameter: Tensor, place: str) -> None:
        self._place = place
        if parameter.grad is not None:
            known = self._living.get(_key(parameter.grad))
            if known is not None:
                known[0].is_gradient = True


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
