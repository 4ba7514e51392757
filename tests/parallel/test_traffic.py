"""What training sends: the metric in every layout, and beside it the counter of a host's interface."""

import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from modelwright.parallel.mesh import single
from modelwright.parallel.traffic import Traffic, connections_sent
from modelwright_claims import netns
from parallel import traffic_run
from rank_processes import all_well, run_ranks, start_process, wait_for

SCRIPT = Path(traffic_run.__file__)
GRADIENT_BYTES = 4 * traffic_run.SHAPE.num_parameters
HIDDEN_BYTES = 4 * 8 * 32 * traffic_run.SHAPE.model_dim
"""Tokens in a batch: 8 rows of 32."""
EMBEDDING_BYTES = 4 * traffic_run.SHAPE.vocab_size * traffic_run.SHAPE.model_dim
"""Its gradients, which the first and the last stage of a pipeline exchange."""

THREE_LEVEL = {"transport": {"kind": "three_level", "three_level": {"keep": 0.005}}}
INT8 = {"transport": {"kind": "int8"}}
SELDOM = {"transport": {"local_steps": {"every": 4}}}
HYBRID = {"shard": "full", "shard_group": 2}


def case(name: str, layout: dict[str, Any], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "layout": layout, "settings": settings or {}}


LAYOUTS = {
    "copies": ({"share_memory": False}, GRADIENT_BYTES, GRADIENT_BYTES),
    "optimizer": ({"shard": "optimizer"}, 1.5 * GRADIENT_BYTES, GRADIENT_BYTES),
    "gradients": ({"shard": "gradients"}, 1.5 * GRADIENT_BYTES, GRADIENT_BYTES),
    "full": ({"shard": "full"}, 2 * GRADIENT_BYTES, 1.5 * GRADIENT_BYTES),
    "tensor": ({"tensor": 2}, 30 * HIDDEN_BYTES, 24 * HIDDEN_BYTES),
    "pipeline": ({"pipeline": 2}, HIDDEN_BYTES + EMBEDDING_BYTES, HIDDEN_BYTES + EMBEDDING_BYTES),
}
"""Layouts of two processes; what a rank sends in a step at most, beside headers and small sums, and at least.

ZeRO gathers half of the weights in forward, stage 3 again in backward, and scatters gradients, for which gloo sends
what an all-reduce would. Tensor parallelism gathers and scatters the residual stream twice a block, forward and back.
"""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    cases = [case(name, layout) for name, (layout, _, _) in LAYOUTS.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(SCRIPT, folder, folder / "cases.json", size=2)
    return folder


def per_step(folder: Path, name: str, counter: str, rank: int = 0) -> float:
    """Mean over all steps but the first, which lays out and warms up, and the last, after which local steps end."""
    sent = json.loads((folder / f"{name}-{rank}.json").read_text())[counter]
    return (sent[-2] - sent[0]) / (len(sent) - 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_counts_what_it_sends(layouts, name):
    _, most, least = LAYOUTS[name]
    assert least <= per_step(layouts, name, "metric") <= 1.1 * most + 2**14
    recorded = [value for _, value in json.loads((layouts / f"{name}-0.json").read_text())["recorded"]]
    assert len(recorded) == traffic_run.NUM_STEPS
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


def on_two_hosts(folder: Path, cases: list[dict[str, Any]], *, per_host: int) -> None:
    """Run the cases on so many processes in each of two namespaces."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with netns.Network(netns.star(2)) as net:
        port, size = netns.free_port(net, "h0"), 2 * per_host
        ranks = []
        for rank in range(size):
            host = net.hosts[rank // per_host]
            environment = net.torch_environment(host, "h0", port) | {"RANK": str(rank), "WORLD_SIZE": str(size)}
            arguments = (folder, folder / "cases.json", f"{net.tag}-{host}")
            ranks.append(start_process(SCRIPT, *arguments, environment=environment))
        all_well(wait_for(ranks))


@pytest.fixture(scope="module")
def namespaces():
    if reason := netns.missing():
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces")
def test_the_metric_is_what_the_interface_sends(tmp_path):
    """Copies with exact and with compressed sums, and ZeRO-3, on two hosts of one process each."""
    copies = {"share_memory": False}
    cases = [case("exact", copies), case("three_level", copies, THREE_LEVEL), case("full", {"shard": "full"})]
    on_two_hosts(tmp_path, cases, per_host=1)
    for name in ("exact", "three_level", "full"):
        # The interface counts segments that the kernel joins once, the metric each with its header (66 of 1,514 bytes).
        assert per_step(tmp_path, name, "metric") == pytest.approx(per_step(tmp_path, name, "interface"), rel=0.06)
    removed = 1 - per_step(tmp_path, "three_level", "metric") / per_step(tmp_path, "exact", "metric")
    assert removed == pytest.approx(
        1 - per_step(tmp_path, "three_level", "interface") / per_step(tmp_path, "exact", "interface"), abs=0.002
    )


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
    on_two_hosts(tmp_path, cases, per_host=2)
    sent = {one["name"]: per_step(tmp_path, one["name"], "interface") for one in cases}
    assert GRADIENT_BYTES <= sent["exact"] <= 1.1 * GRADIENT_BYTES  # each of two ranks sends its half, both ways
    assert sent["int8"] < 0.3 * sent["exact"]
    assert sent["three_level"] < 0.02 * sent["exact"]
    assert sent["seldom"] < 0.3 * sent["exact"]
    losses = {one["name"]: json.loads((tmp_path / f"{one['name']}-0.json").read_text())["losses"] for one in cases}
    for name, values in losses.items():
        assert values[-1] < values[0] - 0.1, name
        assert name == "exact" or values != losses["exact"]
