"""The verdicts of the claims that are measured on networks of their own, and quick measurements where there is root."""

from dataclasses import replace
from typing import Any

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.parallel.topology.collectives import FlatCost, Planner
from modelwright.parallel.topology.links import Links
from modelwright_claims import compressed_links, topology
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.gradient_compression import METHOD
from modelwright_claims.judging import judge
from modelwright_claims.netns import Link, missing
from modelwright_claims.training_run import Outcome, execute
from modelwright_claims.workbench import Size

OTHER = "int8-local-20"
needs_networks = pytest.mark.skipif(bool(missing()), reason=missing())


def run(bytes_per_step: float, exchange_ms: float, tokens_per_s: float) -> dict[str, float]:
    return {"bytes_per_step": bytes_per_step, "exchange_ms": exchange_ms, "step_ms": 9.0, "tokens_per_s": tokens_per_s}


def links(bytes_per_step: float = 19.0, exchange_ms: float = 4.9, tokens_per_s: float = 95.0, uneven: float = 0.0):
    """Two rounds. uneven: share by which the method's exchange is longer in the second one and shorter in the first."""
    slow = {
        compressed_links.EXACT: run(1000, 50, 40),
        compressed_links.AFTER: run(1000, 100, 30),
        METHOD: run(bytes_per_step, exchange_ms, tokens_per_s),
        OTHER: run(10.0, 2.0, 97.0),
    }
    samples: dict[str, list[float]] = {}
    for name, one in slow.items():
        for what, value in one.items():
            share = uneven if (name, what) == (METHOD, "exchange_ms") else 0.0
            on_slow = [value * (1 + sign * share) for sign in (-1, 1)]
            samples[compressed_links.sample_name(what, name, compressed_links.MBIT)] = on_slow
        for what, value in run(1, 1, 100).items():
            samples[compressed_links.sample_name(what, name, compressed_links.UNLIMITED)] = [value] * 2
    return Measurement(samples=samples)


def test_all_three_targets_on_the_slow_link_have_to_be_met():
    met = judge(compressed_links.CLAIM, links())
    assert met.kind == "met"
    assert met.figures[f"bytes removed, {METHOD}, 100 Mbit/s"].value == pytest.approx(98.1)
    assert met.figures[f"communication shorter, {METHOD}, 100 Mbit/s"].value == pytest.approx(100 / 4.9)
    assert met.figures[f"throughput over exact, {METHOD}, 100 Mbit/s"].value == pytest.approx(95 / 40)
    assert met.figures[f"throughput of the unlimited link's, {METHOD}, 100 Mbit/s"].value == pytest.approx(95)
    assert "10.2x shorter than what exact sums that overlap" in met.reason
    assert f"best of those tried: {OTHER}, 99.00% of the bytes removed, communication 50.0x shorter, 97%" in met.reason
    for worse in ({"bytes_per_step": 21.0}, {"exchange_ms": 5.1}, {"tokens_per_s": 89.0}, {"uneven": 0.05}):
        assert judge(compressed_links.CLAIM, links(**worse)).kind == "short", worse


def racks(backend: float, doubling: float, method: float) -> dict[str, Any]:
    times = dict(zip(topology.UNINFORMED, (backend, doubling), strict=True)) | {topology.METHOD: method}
    network = [Link(ends=("h0", "rack"), mbit=100.0, delay_ms=0.5)]
    return {"ms": {arm: [time, 1.01 * time] for arm, time in times.items()}, "network": network, "plans": {}}


def test_the_smallest_message_between_racks_decides_against_the_faster_uninformed_algorithm():
    def judged(**found: dict[str, Any]) -> Verdict:
        return judge(topology.CLAIM, topology.measurement(found))

    assert judged(racks=racks(8.0, 9.0, 1.99), shaped=racks(8.0, 8.0, 8.0)).kind == "met"
    short = judged(racks=racks(8.0, 9.0, 2.1))
    assert short.kind == "short"
    assert short.figures["4 KiB shorter than by arrival, flat, 4 KiB"].value == pytest.approx(8 / 2.1)
    assert judged(racks=racks(8.0, 7.0, 1.99)).kind == "short"
    conditions = topology.measurement({"racks": racks(8.0, 8.0, 2.0)}).conditions
    assert conditions["links, racks"] == "100 Mbit/s, 0.5 ms"


def test_recursive_doubling_has_to_be_in_the_record():
    found = topology.measurement({"racks": racks(8.0, 9.0, 1.0)})
    samples = {name: of for name, of in found.samples.items() if "doubling" not in name}
    lacking = judge(topology.CLAIM, replace(found, samples=samples))
    assert lacking.line == "not judged: the record lacks samples 'ms, racks: arrival, doubling, 4 KiB'"


def test_links_that_are_all_alike_leave_the_ranks_in_their_order():
    """Two racks whose ranks alternate: what knows them groups the even ranks, what does not takes 0, 1, 2, ..."""
    ranks = range(4)
    latency = tuple(tuple(0.0 if a == b else 1e-4 if (a - b) % 2 == 0 else 1e-2 for b in ranks) for a in ranks)
    rate = tuple(tuple(0.0 if a == b else 1e8 if (a - b) % 2 == 0 else 1e6 for b in ranks) for a in ranks)
    links = Links(hosts=("a", "b", "c", "d"), latency_s=latency, bytes_per_s=rate)
    flat = FlatCost(latency_s=1.0, s_per_byte=1.0)
    assert len(Planner(links, flat).groups) == 2
    uninformed = Planner(topology.alike(links), flat)
    assert list(uninformed.order) == [0, 1, 2, 3]
    assert len(uninformed.groups) == 1


@pytest.mark.slow
@needs_networks
@pytest.mark.usefixtures("forked_ranks")
def test_a_quick_measurement_of_topology(tmp_path):
    measured = topology.CLAIM.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert all(value > 0 for values in measured.samples.values() for value in values)
    found = judge(topology.CLAIM, measured)
    assert found.figures["4 KiB shorter than by arrival, flat, 4 KiB"].value > 0  # how much is a matter of the machine


def test_the_first_steps_and_the_last_one_are_not_measured():
    first, last = [1000.0] * compressed_links.WARM_UP, [1000.0]
    steps = {name: [*first, 1.0, 3.0, *last] for name in ("comm_s", "step_time_s", "num_tokens")}
    steps["interface_bytes"] = [*range(compressed_links.WARM_UP), 119.0, 219.0, 5000.0]
    found = compressed_links.after_warm_up(Outcome(heldout_loss=1.0, seconds=1.0, steps=steps))
    assert found == {"bytes_per_step": 100.0, "exchange_ms": 2000.0, "step_ms": 2000.0, "tokens_per_s": 1.0}


@pytest.mark.slow
@needs_networks
def test_one_run_on_two_hosts_with_a_slow_link(text_folder):
    size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=24)
    setting = Setting(quick=False, folder=text_folder, progress=SilentProgress())
    found = compressed_links.after_warm_up(execute(setting, compressed_links.variant(OTHER, 100.0, size)))
    assert 0 < found["bytes_per_step"] < 200_000
    assert 0 < found["exchange_ms"] < found["step_ms"]
    assert found["tokens_per_s"] > 0
