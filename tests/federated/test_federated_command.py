"""The commands: a server and two clients fine-tune the model of a run over loopback."""

import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from modelwright.cli.main import main
from modelwright.core.records import read_records
from modelwright.data.tokenizer import Tokenizer
from modelwright.federated.weights import weight_vector
from modelwright.model.hf import load_model
from rank_processes import start_process


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with packed rows and a model."""
    folder = tmp_path_factory.mktemp("base")
    lines = (f"{n} is followed by {n + 1}, and twice {n} is {2 * n}: a line of text." for n in range(900))
    (folder / "text.txt").write_text("\n".join(lines))
    words = ["run", "tiny", "--run-dir", str(folder / "run"), "--data.sources", str(folder / "text.txt")]
    words += ["--stages", "clean,tokenize,pack,pretrain", "--pretrain.num_steps", "2", "--tokenizer.vocab_size", "400"]
    words += ["--pack.seq_len", "64", "--model.max_seq_len", "64", "--pretrain.batch_tokens", "256"]
    assert main([*words, "--hardware.num_threads", "1"]) == 0
    return folder / "run"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_server_and_two_clients(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With adapters whose aggregate also changes frozen weights: more is sent to clients than comes back."""
    settings, keys, port = tmp_path / "federated.yaml", tmp_path / "keys", str(free_port())
    settings.write_text(
        "num_rounds: 2\nlocal_steps: 2\nmin_clients: 2\nround_timeout_s: 120\nlora: {r: 4, aggregation: fedex}\n"
    )
    capsys.readouterr()
    assert main(["federated", "keys", "ann", "ben"]) == 0
    keys.write_text(capsys.readouterr().out)
    keys.chmod(0o600)
    common = ["--settings", str(settings), "--keys", str(keys)]
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "notes.txt").write_text("not the client's")
    clients = [
        start_process(
            "modelwright.cli.main", "federated", "client", str(base), "--rows", str(base), "--name", name, "--server",
            f"127.0.0.1:{port}", "--learning-rate", "0.2", *common, "--dir", str(tmp_path / name),
        )
        for name in ("ann", "ben")
    ]  # fmt: skip
    assert main(["federated", "server", str(base), "--port", port, *common, "--dir", str(tmp_path / "server")]) == 0
    assert [client.end()[0] for client in clients] == [0, 0]
    captured = capsys.readouterr()
    model = Path(captured.out.strip())
    assert "round 2 of 2: 2 clients, update of norm" in captured.err
    before, after = (weight_vector(load_model(folder)) for folder in (base / "pretrain" / "artifact", model))
    assert (tmp_path / "ann" / "notes.txt").read_text() == "not the client's"
    assert 0 < np.abs(after - before).max() < 1
    assert Tokenizer.load(model).vocab_size == Tokenizer.load(base / "tokenize" / "artifact").vocab_size
    assert [one["clients"] for one in read_records(tmp_path / "server" / "rounds.jsonl")] == [["ann", "ben"]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--name": "zoe"}, "--name: 'zoe' has no key"),
        ({"--stage": "serve"}, "has no stage 'serve' that learns the next token; choose from pretrain"),
        ({"--server": "here"}, "--server: 'here' is no address"),
        ({"--learning-rate": "0"}, "--learning-rate: must be above 0"),
    ],
)
def test_mistakes_are_named(base: Path, tmp_path: Path, capsys, changes: dict[str, str], message: str) -> None:
    (tmp_path / "settings.yaml").write_text("num_rounds: 1\n")
    (tmp_path / "keys").write_text(f"ann {'0' * 64}\n")
    (tmp_path / "keys").chmod(0o600)
    words = {
        "--rows": str(base), "--name": "ann", "--server": "127.0.0.1:1", "--learning-rate": "0.1",
        "--settings": str(tmp_path / "settings.yaml"), "--keys": str(tmp_path / "keys"), "--dir": str(tmp_path / "x"),
    }  # fmt: skip
    given = [word for pair in {**words, **changes}.items() for word in pair]
    assert main(["federated", "client", str(base), *given]) == 2
    assert message in capsys.readouterr().err
