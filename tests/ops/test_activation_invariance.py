"""Without gradients a row's activations do not depend on how many rows there are, also without kernels of ours."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops import cpu_kernels
from modelwright.ops.rope_norm_swiglu import gated_gelu, swiglu

ACTIVATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (swiglu, F.silu),
    "gelu": (partial(gated_gelu, by_tanh=False), F.gelu),
    "gelu_tanh": (partial(gated_gelu, by_tanh=True), partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [43, 64, 100])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_do_not_change_each_other(
    name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    gated, activation = ACTIVATIONS[name]
    draw = torch.Generator().manual_seed(0)
    gate, up = (4.0 * torch.randn(2, 40, width, generator=draw)).to(dtype)
    with torch.inference_mode():
        whole = gated(gate, up)
        for num_rows in range(1, 40):
            part = gated(gate[:num_rows].clone(), up[:num_rows].clone())
            assert torch.equal(part, whole[:num_rows]), f"{num_rows} rows"
    torch.testing.assert_close(whole, (activation(gate) * up).to(dtype))


def test_extreme_gates_are_zero_or_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    gate = torch.tensor([-1e4, -200.0, -0.0, 200.0, 1e4])
    with torch.inference_mode():
        assert swiglu(gate, torch.ones(5)).tolist() == [0.0, 0.0, 0.0, 200.0, 1e4]
