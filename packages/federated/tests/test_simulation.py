"""The commands: Flower's simulation, and the same training by Flower's processes with one client killed."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

from flower_processes import federation
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.records import read_records
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_model
from modelwright_federated import server
from modelwright_federated.command import federated
from modelwright_federated.config import FederatedLoraConfig, load_settings
from modelwright_federated.secure import mean_error
from modelwright_federated.server import START_TIMEOUT_S
from modelwright_federated.weights import GlobalWeights
from rank_processes import start_process

PLAIN = """\
num_rounds: 2
local_steps: 2
min_clients: 2
optimizer: sgd
learning_rate: 0.2
batch_tokens: 256
round_timeout_s: 200
"""
SECURE = PLAIN + "secure_aggregation: {enabled: true, threshold: 2}\nprivacy: {clip_norm: 2.0}\n"
NAMES = ("0-a", "1-b", "2-c")
SIMULATION_TIMEOUT_S = 600.0
"""Ray's processes import PyTorch twice over, which takes minutes while other tests keep the machine busy."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a run with a model, and `a`, `b` and `c`, which end with packed rows."""
    folder = tmp_path_factory.mktemp("runs")
    small = ["--pack.seq_len", "64", "--hardware.num_threads", "1"]
    for limit, value in (("max_top_ngram_fraction", "0.9"), ("max_record_fraction", "1")):  # the lines are alike
        small += [f"--clean.quality.limits.prose.{limit}", value]
    for number, name in enumerate(("base", "a", "b", "c")):
        lines = (
            f"{n} is followed by {n + 1}, and {number + 2} times {n} is {(number + 2) * n}: a line." for n in range(900)
        )
        (folder / f"{name}.txt").write_text("\n".join(lines))
        words = ["run", "tiny", "--run-dir", str(folder / name), "--data.sources", str(folder / f"{name}.txt"), *small]
        if name == "base":
            words += ["--stages", "clean,tokenize,pack,pretrain", "--pretrain.num_steps", "2"]
            words += ["--tokenizer.vocab_size", "400", "--model.max_seq_len", "64", "--pretrain.batch_tokens", "256"]
        else:
            words += ["--stages", "clean,pack", "--init-from", str(folder / "base" / "pretrain" / "artifact")]
        assert main(words) == 0
    return folder


def vector(folder: Path) -> np.ndarray:
    return GlobalWeights(load_model(folder), FederatedLoraConfig()).read()


def simulated(runs: Path, settings: str, out: Path) -> tuple[np.ndarray, list[dict]]:
    """The weights and the rounds of a simulation, in a process of its own, which Ray's own are children of."""
    (out.parent / f"{out.name}.yaml").write_text(settings)
    words = ["simulate", runs / "base", "--rows", *(runs / name for name in "abc"), "--processes", "1", "--dir", out]
    words += ["--settings", out.parent / f"{out.name}.yaml"]
    script = out.parent / f"{out.name}.py"
    lines = ["import sys, warnings", "warnings.simplefilter('default')"]  # Flower and Ray warn of what they do
    lines += ["from modelwright_federated.command import federated", "federated(sys.argv[1:])"]
    script.write_text("\n".join(lines))
    status, output, errors = start_process(script, *words).end(time.monotonic() + SIMULATION_TIMEOUT_S)
    assert status == 0, output + errors
    assert (
        Tokenizer.load(out / "model").vocab_size == Tokenizer.load(runs / "base" / "tokenize" / "artifact").vocab_size
    )
    return vector(out / "model"), list(read_records(out / "rounds.jsonl"))


Simulation = tuple[np.ndarray, list[dict]]


@pytest.fixture(scope="module")
def plain(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    return simulated(runs, PLAIN, tmp_path_factory.mktemp("simulations") / "plain")


@pytest.fixture(scope="module")
def secure(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    return simulated(runs, SECURE, tmp_path_factory.mktemp("simulations") / "secure")


@pytest.mark.slow
def test_a_simulation_trains(runs: Path, plain: Simulation) -> None:
    weights, rounds = plain
    assert np.abs(weights - vector(runs / "base" / "pretrain" / "artifact")).max() > 1e-3
    assert [one["clients"] for one in rounds] == [list(NAMES)] * 2


@pytest.mark.slow
def test_secure_aggregation_changes_the_result_by_no_more_than_its_quantization(
    plain: Simulation, secure: Simulation, tmp_path: Path
) -> None:
    (tmp_path / "secure.yaml").write_text(SECURE)
    config = load_settings(tmp_path / "secure.yaml")
    error = mean_error(config, num_drawn=3, num_clients=3, weight=3.0 * 256)  # far fewer labels than there are
    assert np.abs(secure[0] - plain[0]).max() < 10 * error + 1e-6
    for one, other in zip(plain[1], secure[1], strict=True):
        assert one["clients"] == other["clients"] == list(NAMES)
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_with_a_client_killed(runs: Path, secure: Simulation, tmp_path: Path) -> None:
    """The third client is killed after the first round, in which all took part; that round is the simulation's."""
    _, secure_rounds = secure
    out, settings = tmp_path / "processes", tmp_path / "processes.yaml"
    settings.write_text(SECURE.replace("timeout_s: 200", "timeout_s: 60"))  # the second round waits for the client
    words = ["app", str(runs / "base"), "--settings", str(settings), "--dir", str(out), "--out", str(tmp_path / "app")]
    assert federated(words) == 0
    nodes = {
        name: {
            "model": str(runs / "base"), "rows": str(runs / name[2:]), "settings": str(settings), "name": name,
            "dir": str(tmp_path / f"node-{name}"),
        }
        for name in NAMES
    }  # fmt: skip
    with federation(tmp_path, nodes) as flower:
        process = flower.start(tmp_path / "app", tmp_path / "output.txt")
        log, end = out / "rounds.jsonl", time.monotonic() + 240
        while process.poll() is None and time.monotonic() < end:
            if log.exists() and len(read_records(log)) == 1:
                flower.kill("2-c")
                break
            time.sleep(0.05)
        process.wait(600)
    text = (tmp_path / "output.txt").read_text()
    rounds = list(read_records(log))
    assert (out / "model").is_dir(), text
    assert rounds[0]["clients"] == list(NAMES), text
    assert rounds[0]["update_norm"] == pytest.approx(secure_rounds[0]["update_norm"], rel=1e-5)
    assert rounds[0]["loss"] == pytest.approx(secure_rounds[0]["loss"], abs=1e-5)
    assert [one["clients"] for one in rounds[1:]] == [["0-a", "1-b"]], text
    assert rounds[1]["loss"] == pytest.approx(secure_rounds[1]["loss"], abs=0.2)


class SlowGrid:
    """Three clients, of which some answer, and whose processes take their time to start before the first answer."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers, self.asked = num_answers, list[str]()

    def get_node_ids(self) -> list[int]:
        return [1, 2, 3]

    def send_and_receive(self, messages: Sequence[Message], *, timeout: float) -> list[Message]:
        assert timeout > START_TIMEOUT_S - 60
        self.asked += [message.metadata.message_type for message in messages]
        return [Message(RecordDict(), reply_to=_sent(message)) for message in messages[: self.num_answers]]


def _sent(message: Message) -> Message:
    message.metadata.__dict__["_message_id"] = "1"  # Flower's own grid gives one, and a reply must name it
    return message


@pytest.mark.parametrize("num_answers", [3, 2])
def test_rounds_begin_when_all_processes_have_started(num_answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that processes take to start is not the first round's."""
    grid, seen = SlowGrid(num_answers), list[list[str]]()

    def run(server_app: ServerApp, client_app: ClientApp, **options: Any) -> None:
        server_app(grid, Context(0, 0, {}, RecordDict(), {}))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(server, "run_simulation", run)
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)
    monkeypatch.setattr(server, "_start_ray", lambda num_processes: None)
    outcome = pytest.raises(ModelwrightError, match="2 of 3 clients") if num_answers < 3 else nullcontext()
    with outcome:
        server.simulate(lambda *_: seen.append(list(grid.asked)), lambda number: None, num_clients=3, num_processes=9)  # pyright: ignore
    assert seen == ([["query"] * 3] if num_answers == 3 else [])


@pytest.mark.parametrize("num_failures", [1, 3])
def test_ray_that_does_not_start_ends_the_simulation(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    starts, ran = list[int](), list[bool]()

    def init(*, num_cpus: int, **options: Any) -> None:
        starts.append(num_cpus)
        if len(starts) <= num_failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(server, "run_simulation", lambda *_, **__: ran.append(True))
    with (
        pytest.raises(ModelwrightError, match=r"timed out during startup.*logs") if num_failures == 3 else nullcontext()
    ):
        server.simulate(lambda *_: None, lambda number: None, num_clients=2, num_processes=9)  # pyright: ignore
    assert starts == [2] * min(num_failures + 1, 3)
    assert ran == [True] * (num_failures < 3)
    assert capsys.readouterr().err.count("Ray did not start") == num_failures


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {"--stage": "serve"},
            PLAIN,
            "lacks rows of a stage 'serve'",
        ),
        ({}, PLAIN.replace("clients: 2", "clients: 5"), "--rows: has 2 runs, and a round needs 5"),
        ({}, PLAIN + "proximal_mu: 0.5\n", "without effect: proximal_mu"),
        ({}, PLAIN.replace("256", "100"), "batch_tokens: 100 must be a multiple of the row length"),
        ({"--processes": "0"}, PLAIN, "--processes: must be at least 1"),
    ],
)
def test_mistakes_are_named(runs: Path, tmp_path: Path, changes: dict[str, str], settings: str, message: str) -> None:
    (tmp_path / "f.yaml").write_text(settings)
    words = ["simulate", str(runs / "base"), "--rows", str(runs / "a"), str(runs / "b")]
    words += ["--settings", str(tmp_path / "f.yaml"), "--dir", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=message):
        federated([*words, *(word for pair in changes.items() for word in pair)])
