"""The Triton kernel that quantizes blocks against the reference, to the bit: by Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_codes_and_scales_are_the_references(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    command = [sys.executable, str(Path(__file__).with_name("quantize_tiles_process.py")), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 250_000
