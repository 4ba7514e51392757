"""Processes and hosts that are killed under a real torchrun: the run goes on by itself and ends as it would have."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from modelwright.core.config import ConfigError
from modelwright.core.records import column, read_records
from modelwright.parallel import elastic
from modelwright.parallel.elastic import LaunchConfig, fit, num_used, torchrun_environment, torchrun_options
from modelwright.parallel.mesh import ParallelConfig
from refusals import config_error
from tolerances import TOLERANCES

SCRIPT = Path(__file__).with_name("elastic_run.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of one process alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    tiny_run.run(folder, tiny_run.settings(num_steps=16))
    return losses(folder)


def losses(folder):
    return torch.tensor(column(read_records(folder / "metrics.jsonl"), "loss"))


def start(folder, fault, *, host="a", **config):
    """torchrun of one host, in a process group of its own so that nothing of it stays behind."""
    options = torchrun_options(LaunchConfig(**config), "c10d")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder), fault]
    environment = torchrun_environment({**os.environ, "HOST_NAME": host}, threads=1)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(*launched):
    try:
        outcomes = [(process.communicate(timeout=200)[1], process.returncode) for process in launched]
    finally:
        for process in launched:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return outcomes


def starts(folder):
    """(rank, world size) of every process that took part, by restart."""
    found = {}
    for line in (folder / "starts.txt").read_text().splitlines():
        restart, rank, size = map(int, line.split())
        found.setdefault(restart, set()).add((rank, size))
    return found


@pytest.mark.slow
def test_a_killed_process_comes_back_and_a_third_one_waits(undisturbed, tmp_path):
    """Three processes cannot share eight rows: two train."""
    [(errors, code)] = finish(start(tmp_path, "process", processes=3))
    assert code == 0, errors[-3000:]
    assert (tmp_path / "fault").exists()
    assert starts(tmp_path) == {0: {(0, 2), (1, 2)}, 1: {(0, 2), (1, 2)}}
    torch.testing.assert_close(losses(tmp_path), undisturbed, **TOLERANCES["fp32_loss"])


@pytest.mark.slow
def test_a_killed_host_is_done_without(undisturbed, tmp_path):
    """Either may go: where the hosts find each other is on neither of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = {"rdzv_endpoint": f"127.0.0.1:{port}", "external_store": True, "max_hosts": 2, "last_call_timeout_s": 4}
    serve = f"from modelwright.parallel.elastic import serve_rendezvous; serve_rendezvous({port})"
    store = subprocess.Popen([sys.executable, "-c", serve])
    try:
        launched = [start(tmp_path, "host", host=host, keep_alive_timeout_s=3, **hosts) for host in "ab"]
        (errors, code), (_, killed) = finish(*launched)
    finally:
        store.kill()
        store.wait()
    assert killed == -signal.SIGKILL
    assert code == 0, errors[-3000:]
    assert starts(tmp_path) == {0: {(0, 2), (1, 2)}, 1: {(0, 1)}}
    torch.testing.assert_close(losses(tmp_path), undisturbed, **TOLERANCES["fp32_loss"])


@pytest.mark.parametrize(
    ("config", "num_processes", "expected"),
    [
        ({}, 8, {"data": 8}),
        ({}, 7, {"data": 6}),
        ({"data": 4}, 8, {"data": 4}),
        ({"data": 4}, 3, {"data": 3}),
        ({"pipeline": 2, "tensor": 2}, 15, {"data": 3}),
        ({"zero_stage": 3, "shard_group_size": 2}, 4, {"data": 4, "shard_group_size": 2}),
        ({"zero_stage": 3, "shard_group_size": 2}, 3, {"data": 3, "shard_group_size": 0}),
        ({"zero_stage": 3, "shard_group_size": 4}, 6, {"data": 6, "shard_group_size": 2}),
    ],
)
def test_the_data_axis_takes_what_fits(config, num_processes, expected):
    given = ParallelConfig(**config)
    found = fit(given, num_processes=num_processes, num_rows=24)
    assert {name: getattr(found, name) for name in expected} == expected
    assert (found.pipeline, found.tensor) == (given.pipeline, given.tensor)
    assert num_used(found) <= num_processes
    found.axes(num_used(found))


def test_too_few_processes_for_one_copy_are_refused():
    with config_error("data", match=r"^data: one replica of the model takes 4 processes .* 3 remain"):
        fit(ParallelConfig(pipeline=2, tensor=2), num_processes=3, num_rows=8)


@pytest.mark.parametrize(
    "wrong", [{"processes": 0}, {"max_hosts": 0}, {"max_restarts": -1}, {"keep_alive_timeout_s": 1}, {"max_hosts": 2}]
)
def test_wrong_settings_are_named(wrong):
    name = "rdzv_endpoint" if wrong == {"max_hosts": 2} else next(iter(wrong))
    with pytest.raises(ConfigError, match=f"^{name}: "):
        LaunchConfig(**wrong)


class Handler:
    """A rendezvous whose store is out of reach; it has been closed when somebody has told it so."""

    def __init__(self) -> None:
        self.is_closed = False

    def next_rendezvous(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        raise RendezvousConnectionError("no answer")

    def shutdown(self) -> bool:
        self.is_closed = True
        return True


def gate_on(handler: Handler, stop: elastic._StopSignals | None = None) -> elastic._Gate:
    gate = elastic._Gate.__new__(elastic._Gate)
    vars(gate).update(_handler=handler, _before_return=lambda: None, has_been_in=False, _is_cut_off=False)
    vars(gate).update(_stop=stop or elastic._StopSignals())
    return gate


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_while_workers_are_being_started(number):
    """From the end of the rendezvous to the agent's first question afterwards; at other times it is heard at once."""
    before = signal.getsignal(number)
    with elastic._StopSignals() as stop:
        gate = gate_on(Handler(), stop)
        gate.next_rendezvous()
        os.kill(os.getpid(), number)
        assert stop.asked == [number]
        with pytest.raises(SignalException) as caught:
            gate.num_nodes_waiting()
        assert caught.value.sigval == signal.SIGTERM, "what workers are stopped by, whatever came"
        with pytest.raises(SignalException):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_host_that_lost_the_others_does_not_close_the_door_behind_itself():
    left, cut_off = gate_on(Handler()), gate_on(Handler())
    for gate in (left, cut_off):
        gate.next_rendezvous()
    with pytest.raises(RendezvousConnectionError):
        cut_off.num_nodes_waiting()
    assert left.shutdown()
    assert left._handler.is_closed
    assert not cut_off.shutdown()
    assert not cut_off._handler.is_closed


def test_a_host_that_was_cut_off_looks_for_the_others_again_and_one_that_never_found_them_does_not(monkeypatch):
    monkeypatch.setattr(elastic, "_LOOK_AGAIN_S", 0.0)
    gates: list[elastic._Gate] = []
    outcomes = iter(["lost", "unreachable", "unreachable", "lost", "done"])

    def run() -> None:
        outcome = next(outcomes)
        if outcome != "unreachable":
            gates.append(gate_on(Handler()))
            gates[-1].next_rendezvous()
        if outcome != "done":
            raise RendezvousConnectionError(outcome)

    elastic._run_until_found(run, gates, 60.0)
    assert list(outcomes) == []
    outcomes = iter(["unreachable"])
    with pytest.raises(RendezvousConnectionError):
        elastic._run_until_found(run, gates, 60.0)
    outcomes = iter(["lost"])
    with pytest.raises(RendezvousConnectionError):
        elastic._run_until_found(run, gates, 0.0)


def test_variables_of_a_block_leave_those_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change the environment meanwhile, as pytest does before each phase of a test."""
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.setenv("OWN", "before")
    with elastic.environment_with({"OWN": "within", "NEW": "within"}):
        assert (os.environ["OWN"], os.environ["NEW"]) == ("within", "within")
        monkeypatch.setenv("KEPT", "changed")
        monkeypatch.setenv("LATER", "set")
    assert (os.environ["OWN"], os.environ["KEPT"], os.environ["LATER"]) == ("before", "changed", "set")
    assert "NEW" not in os.environ
