"""The verdict on gradient compression, and a quick measurement with real processes."""

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import gradient_compression as claim
from modelwright_claims.claim import Setting
from modelwright_claims.training_run import Run
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=10)


def judge(loss: float, bytes_sent: int, continued: float = 1.0):
    runs = []
    for seed, exact in ((1, 2.0), (2, 4.0)):
        for regime, ends_at, factor in ((claim.FRESH, exact, loss), (claim.CONTINUED, 0.9 * exact, continued)):
            shared = {"seed": seed, "regime": regime}
            runs.append({"name": claim.EXACT, "heldout_loss": ends_at, "bytes_sent": 1000, **shared})
            runs.append({"name": claim.METHOD, "heldout_loss": ends_at * factor, "bytes_sent": bytes_sent, **shared})
    return claim.judge(runs, SIZE)


def test_both_targets_have_to_be_met_in_both_regimes():
    assert judge(1.002, 19).kind == "met"
    assert judge(1.004, 19).kind == "short"
    assert judge(1.002, 19, continued=1.004).kind == "short"
    assert judge(1.002, 21).kind == "short"
    found = judge(1.004, 21, continued=1.001)
    assert found.figures[f"bytes removed, {claim.METHOD}, {claim.FRESH}"].value == pytest.approx(97.9)
    assert found.figures[f"held-out loss above exact, {claim.METHOD}, {claim.FRESH}"].value == pytest.approx(0.4)
    assert found.figures[f"held-out loss above exact, {claim.METHOD}, {claim.CONTINUED}"].value == pytest.approx(0.1)
    assert found.figures["held-out loss that continuing takes off, exact"].value == pytest.approx(10.0)


def test_quick_measurement(tmp_path):
    found = claim.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    for regime in (claim.FRESH, claim.CONTINUED):
        assert 90 < found.figures[f"bytes removed, {claim.METHOD}, {regime}"].value < 99
        assert found.figures[f"held-out loss above exact, {claim.METHOD}, {regime}"].value < 60
    assert found.figures["held-out loss that continuing takes off, exact"].value > 0


def test_continued_runs_start_from_the_exact_run_of_their_seed():
    fresh = claim.fresh_runs([claim.EXACT, claim.METHOD], (1, 2), SIZE, 2)
    continued = claim.continued_runs([claim.METHOD], (1, 2), SIZE, 2, learning_rate=1e-4)
    for seed in (1, 2):
        run = continued[claim.METHOD, seed, claim.CONTINUED]
        assert run.start_from == fresh[claim.EXACT, seed, claim.FRESH]
        assert (run.seed, run.size.learning_rate) == (seed, 1e-4)
        assert run.settings == fresh[claim.METHOD, seed, claim.FRESH].settings


@pytest.mark.parametrize("name", claim.METHODS)
def test_every_method_is_a_configuration(name):
    config = Run(size=SIZE, settings=claim.METHODS[name]).train_config()
    assert config != Run(size=SIZE).train_config()
