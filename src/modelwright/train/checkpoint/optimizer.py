"""The optimizer's state by parameter name, so that it fits any order or grouping of parameters."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.errors import ModelwrightError
from modelwright.ops.dtensor import as_dtensor_like, local


def optimizer_state_dict(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The optimizer's tensors and scalars, by parameter name."""
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def load_optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str], state: Mapping[str, Any]) -> None:
    """Restore what `optimizer_state_dict` returned, on the parameters' devices and in their dtypes."""
    for parameter, name in names.items():
        if name in state:
            optimizer.state[parameter] = {key: _like(value, parameter, key) for key, value in state[name].items()}


@contextmanager
def reading_state() -> Generator[None]:
    """Convert errors caused by a state of another form into one clear error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelwrightError(
            f"the checkpoint's state has another form than this version expects ({error!r}); finish the run with "
            "the version that started it, or start a new one with another --run-dir"
        ) from error


def _like(value: Any, parameter: Tensor, key: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(parameter.device)
    return as_dtensor_like(value, local(value).to(local(parameter).device, parameter.dtype))
