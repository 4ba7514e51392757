"""Training in FP32 ends with the same weights whatever computes it: the kernels of any instruction set, or none."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_run as tiny
import torch

from modelwright.core.library_environment import LOWER
from modelwright.model.decoder import Decoder
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import KERNELS

SHAPE = replace(tiny.SHAPE, head_dim=16)
"""With heads that the kernels of attention take."""
NUM_STEPS = 20
RATE = 1e-3


def weights_after(folder: Path) -> dict[str, torch.Tensor]:
    model = Decoder(SHAPE)
    model.init_weights(0)
    settings = {"num_steps": NUM_STEPS, "learning_rate": RATE, "eval_every_steps": 0, "checkpoint_every_steps": 0}
    tiny.run(folder, tiny.settings(**settings, keep_best=False), model=model)
    return model.state_dict()


@pytest.mark.skipif(not cpu_kernels.instruction_set(), reason="needs a C++ compiler")
@pytest.mark.parametrize("march", ["native", *(level.march for level in LOWER.values())])
def test_weights_agree_with_those_of_pytorchs_operators(march, tmp_path, monkeypatch):
    if march != "native" and cpu_kernels.instruction_set() not in ("avx512", *LOWER):
        pytest.skip("kernels for x86-64 only")
    library = cpu_kernels.compiled_for(march)
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: library)
    monkeypatch.setenv(cpu_kernels.SWITCH, ",".join(KERNELS))
    ours = weights_after(tmp_path / "ours")
    monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    for name, weight in weights_after(tmp_path / "reference").items():
        torch.testing.assert_close(
            ours[name], weight, rtol=0.0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
