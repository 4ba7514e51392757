"""What training sends: the metric in every layout, and beside it the counter of a host's interface."""

import socket
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_run as tiny

from distributed import hosts_of, run_distributed
from modelwright.core.config import parse
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder
from modelwright.parallel.control_plane import Traffic, connections_sent
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.technique import StepInfo, observer
from modelwright_claims import netns
from modelwright_claims.training_run import interface_bytes

SHAPE = replace(tiny.SHAPE, num_layers=4, model_dim=128, ffn_dim=256, head_dim=32)
NUM_STEPS = 7
ONCE = {"num_steps": NUM_STEPS, "eval_every_steps": 0, "checkpoint_every_steps": 0, "learning_rate": 3e-3}
GRADIENT_BYTES = 4 * SHAPE.num_parameters
HIDDEN_BYTES = 4 * 8 * 32 * SHAPE.model_dim
"""Tokens in a batch: 8 rows of 32."""
EMBEDDING_BYTES = 4 * SHAPE.vocab_size * SHAPE.model_dim
"""Its gradients, which the first and the last stage of a pipeline exchange."""

THREE_LEVEL = {"gradient_sync": {"kind": "topk_quantized", "topk_quantized": {"topk_fraction": 0.005}}}
INT8 = {"gradient_sync": {"kind": "int8"}}
SELDOM = {"gradient_sync": {"local_sgd": {"sync_every_steps": 4}}}
HYBRID = {"zero_stage": 3, "shard_group_size": 2}


def case(name: str, layout: dict[str, Any], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "layout": layout, "settings": settings or {}}


LAYOUTS = {
    "copies": ({"shared_memory": False}, GRADIENT_BYTES, GRADIENT_BYTES),
    "optimizer": ({"zero_stage": 1}, 1.5 * GRADIENT_BYTES, GRADIENT_BYTES),
    "gradients": ({"zero_stage": 2}, 1.5 * GRADIENT_BYTES, GRADIENT_BYTES),
    "full": ({"zero_stage": 3}, 2 * GRADIENT_BYTES, 1.5 * GRADIENT_BYTES),
    "tensor": ({"tensor": 2}, 30 * HIDDEN_BYTES, 24 * HIDDEN_BYTES),
    "pipeline": ({"pipeline": 2}, HIDDEN_BYTES + EMBEDDING_BYTES, HIDDEN_BYTES + EMBEDDING_BYTES),
}
"""Layouts of two processes; what a rank sends in a step at most, beside headers and small sums, and at least.

ZeRO gathers half of the weights in forward, stage 3 again in backward, and scatters gradients, for which gloo sends
what an all-reduce would. Tensor parallelism gathers and scatters the residual stream twice a block, forward and back.
"""


@dataclass
class Meter:
    """Controller that writes down every step."""

    every: int = 1
    metric: list[int | None] = field(default_factory=list)
    interface: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        self.metric.append(info.bytes_sent)
        self.interface.append(interface_bytes())
        self.losses.append(info.loss)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run_case(world: World, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return the metric `bytes_sent`, what the host's interfaces have sent, and the loss, of every step."""
    model, meter = Decoder(SHAPE), Meter()
    model.init_weights(0)
    tiny.run(
        folder / case["name"],
        tiny.settings(**{**ONCE, **case["settings"]}),
        model=model,
        world=world,
        parallel=parse(ParallelConfig, case["layout"]),
        techniques=[observer("meter", meter.observe)],
        heldout=[],
    )
    measured = vars(meter)
    if world.is_first:
        return {**measured, "recorded": column(read_records(folder / case["name"] / "metrics.jsonl"), "bytes_sent")}
    return measured


def run_cases(world: World, folder: Path, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {case["name"]: run_case(world, folder, case) for case in cases}


Runs = list[dict[str, dict[str, Any]]]
"""By rank and case, what `run_case` returned."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Runs:
    cases = [case(name, layout) for name, (layout, _, _) in LAYOUTS.items()]
    return run_distributed(run_cases, 2, tmp_path_factory.mktemp("layouts"), cases)


def per_step(runs: Runs, name: str, counter: str, rank: int = 0) -> float:
    """Mean over all steps but the first, which lays out and warms up, and the last, after which local steps end."""
    sent = runs[rank][name][counter]
    return (sent[-2] - sent[0]) / (len(sent) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_counts_what_it_sends(layouts, name):
    _, most, least = LAYOUTS[name]
    assert least <= per_step(layouts, name, "metric") <= 1.1 * most + 2**14
    recorded = [value for _, value in layouts[0][name]["recorded"]]
    assert len(recorded) == NUM_STEPS
    assert all(before < after for before, after in pairwise(recorded))


def test_a_process_alone_sends_nothing():
    assert Traffic(single()).bytes_sent() == 0


def test_a_connection_counts_its_payload_and_its_headers():
    before = connections_sent()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(bytes(10_000))
            assert len(receiver.recv(10_000, socket.MSG_WAITALL)) == 10_000
            sent = [value for connection, value in connections_sent().items() if connection not in before]
    assert 10_000 < max(sent) < 11_000


def on_two_hosts(folder: Path, cases: list[dict[str, Any]], *, per_host: int) -> Runs:
    """Run the cases on so many processes in each of two namespaces."""
    with netns.Network(netns.star(2)) as network:
        hosts = hosts_of(network, ranks_per_host=per_host)
        return run_distributed(run_cases, len(hosts), folder, cases, hosts=hosts)


@pytest.fixture(scope="module")
def namespaces():
    if reason := netns.missing():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_the_metric_is_what_the_interface_sends(tmp_path):
    """Copies with exact and with compressed sums, and ZeRO-3, on two hosts of one process each."""
    copies = {"shared_memory": False}
    cases = [case("exact", copies), case("three_level", copies, THREE_LEVEL), case("full", {"zero_stage": 3})]
    runs = on_two_hosts(tmp_path, cases, per_host=1)
    for name in ("exact", "three_level", "full"):
        # The interface counts segments that the kernel joins once, the metric each with its header (66 of 1,514 bytes).
        assert per_step(runs, name, "metric") == pytest.approx(per_step(runs, name, "interface"), rel=0.06)
    removed = 1 - per_step(runs, "three_level", "metric") / per_step(runs, "exact", "metric")
    assert removed == pytest.approx(
        1 - per_step(runs, "three_level", "interface") / per_step(runs, "exact", "interface"), abs=0.002
    )


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_hybrid_sharding_compresses_what_crosses_between_hosts(tmp_path):
    """Two hosts of two processes: ZeRO-3 within a host, gradients through the transport between them."""
    exact = case("exact", HYBRID)
    cases = [
        exact,
        case("int8", HYBRID, INT8),
        case("three_level", HYBRID, THREE_LEVEL),
        case("seldom", HYBRID, SELDOM),
    ]
    runs = on_two_hosts(tmp_path, cases, per_host=2)
    sent = {one["name"]: per_step(runs, one["name"], "interface") for one in cases}
    assert GRADIENT_BYTES <= sent["exact"] <= 1.1 * GRADIENT_BYTES  # each of two ranks sends its half, both ways
    assert sent["int8"] < 0.3 * sent["exact"]
    assert sent["three_level"] < 0.02 * sent["exact"]
    assert sent["seldom"] < 0.3 * sent["exact"]
    losses = {one["name"]: runs[0][one["name"]]["losses"] for one in cases}
    for name, values in losses.items():
        assert values[-1] < values[0] - 0.1, name
        assert name == "exact" or values != losses["exact"]
