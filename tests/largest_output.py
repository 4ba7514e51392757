"""The largest tensor that operators return, for tests of what never exists whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LargestOutput(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest_tensor(call: Callable[[], object]) -> int:
    """Elements of the largest tensor that any operator returns during the call."""
    with _LargestOutput() as seen:
        call()
    return seen.elements
