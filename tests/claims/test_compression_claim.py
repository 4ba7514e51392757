"""The verdict on gradient compression, and a quick measurement with real processes."""

import pytest

from modelwright.claims import gradient_compression as claim
from modelwright.claims.claim import Setting
from modelwright.claims.workbench import Size
from modelwright.core.progress import SilentProgress

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=10)


def judge(loss: float, bytes_sent: int):
    runs = []
    for seed, exact in ((1, 2.0), (2, 4.0)):
        runs.append({"name": claim.EXACT, "seed": seed, "heldout_loss": exact, "bytes_sent": 1000})
        runs.append({"name": claim.METHOD, "seed": seed, "heldout_loss": exact * loss, "bytes_sent": bytes_sent})
    return claim.judge(runs, SIZE)


def test_both_targets_have_to_be_met():
    assert judge(1.002, 19).kind == "met"
    assert judge(1.004, 19).kind == "short"
    assert judge(1.002, 21).kind == "short"
    found = judge(1.004, 21)
    assert found.figures[f"bytes removed, {claim.METHOD}"].value == pytest.approx(97.9)
    assert found.figures[f"held-out loss above exact, {claim.METHOD}"].value == pytest.approx(0.4)


def test_quick_measurement(tmp_path):
    found = claim.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert 90 < found.figures[f"bytes removed, {claim.METHOD}"].value < 99
    assert found.figures[f"held-out loss above exact, {claim.METHOD}"].value < 60
