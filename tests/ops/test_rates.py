"""The measured rates are positive, and a missing backend is said so."""

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.ops.microbenchmark import int8_linear_rate, matmul_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate(dtype):
    assert matmul_rate(16, 32, 24, dtype=dtype, device="cpu", repeats=2) > 0


@pytest.mark.parametrize("backend", ["fbgemm", "int_mm"])
def test_int8_linear_rate(backend):
    if backend == "fbgemm" and "fbgemm" not in torch.backends.quantized.supported_engines:
        with pytest.raises(ConfigError, match="use 'int_mm'"):
            int8_linear_rate(17, 32, 24, backend=backend, repeats=2)
    else:
        assert int8_linear_rate(17, 32, 24, backend=backend, repeats=2) > 0
