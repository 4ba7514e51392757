"""Sparse updates on two processes, through THE loop: one choice on both, less to send, the same bits after a stop."""

import pytest
import torch

from wired_cases import COPIES, RARE, Runs, case, ended, losses, values, weights

pytestmark = pytest.mark.slow

FORMS = {
    "columns": {"sparse_updates": {"kind": "columns", "keep_fraction": 0.5, "refresh_every_steps": 2}},
    "rows": {"sparse_updates": {"kind": "rows", "keep_fraction": 0.5, "refresh_every_steps": 3, "signal": "momentum"}},
    "layers": {"sparse_updates": {"kind": "layers", "keep_fraction": 0.5, "refresh_every_steps": 2}},
    "prefix": {
        "sparse_updates": {
            "kind": "freeze_prefix",
            "keep_fraction": 0.5,
            "density_schedule": "dense_first",
            "ramp_fraction": 0.5,
        }
    },
    "change": {"batch_selection": {"signal": "loss_change", "keep_fraction": 0.5, "probe_tokens": 8}},
    "limited": {
        "batch_selection": {"signal": "loss_change", "keep_fraction": 0.5, "probe_tokens": 8, "max_initial_loss": 0.99}
    },
}
CHECKED = {"fault_tolerance": {"replica_check_every_steps": 1}}
UNITS = ("columns", "rows", "layers", "prefix")

CASES = [
    case("dense", settings=RARE, **COPIES),
    *[case(name, settings={**RARE, **CHECKED, **sparse}) for name, sparse in FORMS.items()],
    *[
        case(
            f"{name}-stopped",
            f"{name}-2",
            settings={**RARE, **sparse},
            mishap={"kind": "stop", "step": 7},
        )
        for name, sparse in FORMS.items()
    ],
    *[case(f"{name}-again", f"{name}-2", settings={**RARE, **sparse}) for name, sparse in FORMS.items()],
    case("whole-columns", settings={**RARE, "sparse_updates": {"kind": "columns", "keep_fraction": 1.0}}),
    case("divided", settings={**RARE, **FORMS["layers"]}, parallel={"zero_stage": 3}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sparse"), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_both_ranks_choose_alike_and_a_stopped_run_ends_with_the_same_bits(runs, name):
    first, second, again = weights(runs, name), weights(runs, name, rank=1), weights(runs, f"{name}-again", rank=1)
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key
        assert torch.equal(weight, again[key]), key
    assert ended(runs, f"{name}-stopped")["kind"] == "Stopped"
    assert losses(runs, f"{name}-2") == losses(runs, name)
    assert losses(runs, name)[-1] < losses(runs, name)[0] - 0.2
    executed, dense = (values(runs, one, "executed_flops") for one in (name, "dense"))
    assert min(mine / whole for mine, whole in zip(executed, dense, strict=True)) < 0.9


@pytest.mark.slow
def test_frozen_blocks_are_not_sent(runs):
    dense = ended(runs, "dense")["bytes_sent"]
    assert ended(runs, "layers")["bytes_sent"] < 0.75 * dense
    assert ended(runs, "prefix")["bytes_sent"] < 0.9 * dense


@pytest.mark.parametrize("name", ["columns", "rows"])
def test_rows_that_are_zero_are_not_sent(runs, name):
    """Half of every projection from the second choice on; `CHECKED` runs would end where ranks come to differ."""
    assert ended(runs, name)["bytes_sent"] < 0.8 * ended(runs, "dense")["bytes_sent"]


def test_all_chosen_is_the_dense_run(runs):
    assert losses(runs, "whole-columns") == pytest.approx(losses(runs, "dense"), rel=1e-5)
    assert values(runs, "whole-columns", "executed_flops") == values(runs, "dense", "executed_flops")


def test_a_divided_model_is_refused(runs):
    assert ended(runs, "divided")["kind"] == "ConfigError"
    assert ended(runs, "divided")["error"].startswith("sparse_updates.")
