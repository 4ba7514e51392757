"""The slow store, the figures and the verdict of `loading_latency`, and a short measurement without peers.

That tiers keep their budgets and that a flipped byte is named is tested in `tests/data/test_row_cache.py`.
"""

import dataclasses
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright_claims import loading_latency, loading_worker
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.loading_latency import FIRST, P50, P99, SECOND, SHARE, START, STEP, add_samples, arm_names
from modelwright_claims.loading_worker import AHEAD, CACHE, DIRECT, LITDATA, PEERS, STREAMING, TIERS, Task
from modelwright_claims.slow_store import serving

LATENCY_S, BYTES_PER_S = 0.05, 1e6


def request(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=30) as reply:
        return reply.status, reply.read(), dict(reply.headers)


def test_the_store_serves_objects_and_parts_of_them_and_each_request_waits(tmp_path: Path) -> None:
    content = bytes(range(250)) * 400
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "object.bin").write_bytes(content)
    (tmp_path.parent / "outside.bin").write_bytes(b"secret")
    with serving(tmp_path, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as url:
        place = f"{url}/bucket/object.bin"
        started = time.perf_counter()
        assert request(place)[:2] == (200, content)
        assert time.perf_counter() - started >= LATENCY_S + len(content) / BYTES_PER_S
        started = time.perf_counter()
        status, part, headers = request(place, Range="bytes=10-19")
        assert (status, part, headers["Content-Range"]) == (206, content[10:20], "bytes 10-19/100000")
        assert time.perf_counter() - started >= LATENCY_S
        status, nothing, headers = request(place, "HEAD")
        assert (status, nothing, headers["Content-Length"]) == (200, b"", "100000")
        for missing in ("bucket/another.bin", "..%2Foutside.bin", "bucket"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                request(f"{url}/{missing}")


def test_the_first_batch_is_in_no_figure_but_its_own() -> None:
    samples = dict[str, list[float]]()
    waits = [9.0, *[0.001 * number for number in range(1, 201)]]
    computed = [5.0, *[0.1] * 200]
    add_samples(samples, CACHE, {"waits_s": [waits, waits], "computed_s": [computed, computed]})
    arm = arm_names(CACHE)[1]
    assert samples[P50 + arm] == [pytest.approx(100)]
    assert samples[P99 + arm] == [pytest.approx(198)]
    assert samples[STEP + arm] == [pytest.approx(100 + 100.5)]
    assert samples[SHARE + arm] == [pytest.approx(100 * 100 / 200.5)]
    assert samples[START + arm] == [9000]
    with pytest.raises(ValueError, match="shorter"):
        add_samples(samples, TIERS, {"waits_s": [waits], "computed_s": [computed]})


def test_an_epoch_that_lacks_a_row_ends_the_measurement(tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(10, 4)
    np.save(tmp_path / "rows.npy", rows)
    values = {field.name: "" for field in dataclasses.fields(Task)}
    task = Task(**{**values, "rows": str(tmp_path / "rows.npy"), "num_products": 1})  # pyright: ignore
    batches = [torch.from_numpy(rows[first : first + 5].astype(np.int64)) for first in (5, 0)]
    measured = loading_worker.read_epochs(iter([batches, batches]), task)
    assert [len(waits) for waits in measured["waits_s"]] == [2, 2]
    for wrong in (batches[:1], [batches[0], batches[0]], [*batches, batches[1]]):
        with pytest.raises(SystemExit, match="which are not the 10 that were written"):
            loading_worker.read_epochs(iter([wrong]), task)


def test_peers_make_the_batches_that_the_product_makes(tmp_path: Path) -> None:
    dice, lengths = np.random.default_rng(0), ((5, 3), (8,), (6, 2), (2, 2, 2, 2))
    rows = [[np.append(dice.integers(2, 50, length - 1), 1) for length in pieces] for pieces in lengths]
    documents = [document for row in rows for document in row]
    pack(((one, None) for one in documents), tmp_path, PackConfig(seq_len=8), vocab_size=50, eos_id=1)
    ours = PackedRows(tmp_path).gather(np.arange(4))
    assert (ours.segments_BT >= 0).all(), "the rows are full"
    samples = list(ours.input_ids_BT.numpy().astype(np.uint16))
    for collated in (samples, [{"tokens": row} for row in samples], [torch.from_numpy(row) for row in samples]):
        theirs = loading_worker.training_batch(collated, eos_id=1)
        for name, tensor in theirs.items():
            expected = getattr(ours, f"{name}_BT")
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected), name


def judged(
    first: float = 17.0, second: float = 5.0, peers: Mapping[str, Sequence[float]] | None = None, step_ms: float = 210.0
) -> Verdict:
    """Waits of our two epochs, and of peers, in ms; 120 ms with reading ahead alone."""
    peers = {LITDATA: (30.0, 30.0), STREAMING: (30.0, 30.0), **(peers or {})}
    means = {DIRECT: (250.0,), AHEAD: (120.0,), CACHE: (first, second), **peers}
    samples: dict[str, list[float]] = {loading_latency.ALONE: [207.0]}
    for side, waits in means.items():
        for arm, wait in zip(arm_names(side), waits, strict=bool(waits)):
            for name in (P50, P99, SHARE, STEP, START):
                samples[name + arm] = [wait, 1.01 * wait, 0.99 * wait]
            samples[STEP + arm] = [step_ms if side == CACHE else 210.0] * 3
    return judge(loading_latency.CLAIM, Measurement(samples=samples))


def test_the_verdict_asks_for_both_epochs_and_for_no_peer_that_waits_less() -> None:
    met = judged()
    assert met.kind == "met"
    assert met.figures[f"times lower p99, {FIRST}"].value == pytest.approx(120 / 17, rel=0.01)
    assert set(loading_latency.CLAIM.headline) <= met.figures.keys()
    for verdict, epoch in ((judged(first=21.0), FIRST), (judged(second=21.0), SECOND)):
        assert verdict.kind == "short"
        assert f"{epoch}: p99 of the wait is lower by 5.71x" in verdict.reason
    assert judged(peers={LITDATA: (30.0, 6.0), STREAMING: (17.5, 5.2)}).kind == "met"
    for peers, peer, epoch in (
        ({LITDATA: (16.0, 6.0)}, LITDATA, FIRST),
        ({LITDATA: (30.0, 6.0), STREAMING: (30.0, 4.9)}, STREAMING, SECOND),
    ):
        verdict = judged(peers=peers)
        assert verdict.kind == "short"
        assert f"{epoch}: p99 of the wait above that of {peer}" in verdict.reason
    assert "computing alone takes" in judged(step_ms=229.0).reason
    slower = judged(peers={LITDATA: (30.0, 6.0)}, step_ms=214.0)
    assert f"time of a step to that of {LITDATA}, {FIRST}" in slower.reason


def test_a_loader_that_does_not_read_ahead_is_no_baseline() -> None:
    """Reading directly waits long, and beating it proves nothing: here reading ahead alone waits as little."""
    found = judged(first=100.0, second=100.0, peers={LITDATA: (200.0, 200.0), STREAMING: (200.0, 200.0)})
    assert found.kind == "short"
    assert found.figures[f"times lower p99 than reading directly, {FIRST}"].value == pytest.approx(2.5, rel=0.01)


def test_without_its_rivals_it_is_not_judged() -> None:
    assert judged(peers={LITDATA: (), STREAMING: ()}).line.count("the record lacks samples") == 1


def test_a_record_without_the_cache_is_not_judged() -> None:
    samples = {P99 + arm: [120.0, 121.0, 119.0] for arm in arm_names(DIRECT)}
    verdict = judge(loading_latency.CLAIM, Measurement(samples=samples))
    assert verdict.kind == "not judged"
    assert P99 + arm_names(CACHE)[0] in verdict.reason


def test_an_interpreter_without_peers_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(loading_latency.PEERS_PYTHON, str(tmp_path / "python"))
    assert loading_latency.find_interpreters().versions == {}
    asked = list[str]()
    monkeypatch.setattr(loading_latency, "_run", lambda python, action: asked.append(python) or {LITDATA: "1"})
    monkeypatch.setenv(loading_latency.PEERS_PYTHON, sys.executable)
    interpreters = loading_latency.find_interpreters()
    assert asked == [sys.executable]
    assert interpreters.versions == {LITDATA: "1"}


@pytest.mark.slow
def test_a_short_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache reads the same rows from a store of another process, and waits less for them than reading alone."""
    pytest.importorskip("s3fs")
    monkeypatch.setenv(loading_latency.PEERS_PYTHON, str(tmp_path / "python"))
    monkeypatch.setattr(
        loading_latency, "QUICK", dataclasses.replace(loading_latency.QUICK, num_batches=8, compute_s=0.02)
    )
    measurement = loading_latency.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    arms = [*arm_names(DIRECT), *arm_names(CACHE)]
    assert set(measurement.samples) == {loading_latency.ALONE} | {
        name + arm for name in (P50, P99, SHARE, STEP, START) for arm in arms
    }
    direct, _, warm = (measurement.samples[P50 + arm][0] for arm in arms)
    assert direct >= 1000 * loading_latency.LATENCY_S, "nothing is kept, so each batch waits for a request"
    assert warm < direct
    assert measurement.conditions["peers that are not installed"] == ", ".join(PEERS)
    assert not list(tmp_path.iterdir())
    json.dumps(dict(measurement.conditions))
