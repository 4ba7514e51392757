"""The verdicts of the claims that are measured on networks of their own, and quick measurements where there is root."""

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import compressed_links, topology
from modelwright_claims.claim import Setting
from modelwright_claims.gradient_compression import METHOD
from modelwright_claims.netns import missing
from modelwright_claims.training_run import Outcome, execute
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=10)
OTHER = "int8-local-20"
needs_networks = pytest.mark.skipif(bool(missing()), reason=missing())


def run(bytes_per_step: float, exchange_ms: float, tokens_per_s: float) -> dict[str, float]:
    return {"bytes_per_step": bytes_per_step, "exchange_ms": exchange_ms, "step_ms": 9.0, "tokens_per_s": tokens_per_s}


def links(bytes_per_step: float = 19.0, exchange_ms: float = 5.0, tokens_per_s: float = 95.0):
    slow = {
        compressed_links.EXACT: run(1000, 50, 40),
        compressed_links.AFTER: run(1000, 100, 30),
        METHOD: run(bytes_per_step, exchange_ms, tokens_per_s),
        OTHER: run(10.0, 2.0, 97.0),
    }
    return {
        name: {compressed_links.MBIT: [one], compressed_links.UNLIMITED: [run(1, 1, 100)]} for name, one in slow.items()
    }


def test_all_three_targets_on_the_slow_link_have_to_be_met():
    met = compressed_links.judge(links(), SIZE)
    assert met.kind == "met"
    assert met.figures[f"bytes removed, {METHOD}, 100 Mbit/s"].value == pytest.approx(98.1)
    assert met.figures[f"communication shorter, {METHOD}, 100 Mbit/s"].value == pytest.approx(20.0)
    assert met.figures[f"throughput over exact, {METHOD}, 100 Mbit/s"].value == pytest.approx(95 / 40)
    assert "10.0x against what exact sums that overlap" in met.reason
    assert f"best of those tried: {OTHER}, 99.00%, 50.0x, 97%" in met.reason
    for worse in ({"bytes_per_step": 21.0}, {"exchange_ms": 5.1}, {"tokens_per_s": 89.0}):
        assert compressed_links.judge(links(**worse), SIZE).kind == "short"


def measured(before: float, after: float):
    times = {topology.BEFORE: before, topology.AFTER: after}
    network = [{"ends": ["h0", "rack"], "mbit": 100.0, "delay_ms": 0.5}]
    return {"ms": {arm: {"median": value} for arm, value in times.items()}, "network": network}


def test_the_smallest_message_between_racks_decides():
    assert topology.judge({"racks": measured(8.0, 2.0), "shaped": measured(8.0, 8.0)}).kind == "met"
    short = topology.judge({"racks": measured(8.0, 2.1)})
    assert short.kind == "short"
    assert short.figures["all-reduce of 4 KiB shorter"].value == pytest.approx(8 / 2.1)
    assert short.conditions["links, racks"] == "100 Mbit/s, 0.5 ms"


@needs_networks
def test_a_quick_measurement_of_topology(tmp_path):
    found = topology.CLAIM.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert found.kind in ("met", "short")
    assert found.figures["all-reduce of 4 KiB shorter"].value > 1.0


def test_the_first_steps_and_the_last_one_are_not_measured():
    first, last = [1000.0] * compressed_links.WARM_UP, [1000.0]
    steps = {name: [*first, 1.0, 3.0, *last] for name in ("exchange_s", "step_time_s", "num_tokens")}
    steps["interface_bytes"] = [*range(compressed_links.WARM_UP), 119.0, 219.0, 5000.0]
    found = compressed_links.after_warm_up(Outcome(heldout_loss=1.0, seconds=1.0, steps=steps))
    assert found == {"bytes_per_step": 100.0, "exchange_ms": 2000.0, "step_ms": 2000.0, "tokens_per_s": 1.0}


@needs_networks
def test_one_run_on_two_hosts_with_a_slow_link(text_folder):
    size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=24)
    setting = Setting(quick=False, folder=text_folder, progress=SilentProgress())
    found = compressed_links.after_warm_up(execute(setting, compressed_links.variant(OTHER, 100.0, size)))
    assert 0 < found["bytes_per_step"] < 200_000
    assert 0 < found["exchange_ms"] < found["step_ms"]
    assert found["tokens_per_s"] > 0
