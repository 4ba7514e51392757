"""The commands: a server and two clients fine-tune the model of a run over loopback."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from federated_commands import FEDEX, run_with_rows, train_with_commands
from modelwright.federated.weights import weight_vector

from modelwright.cli.main import main
from modelwright.core.records import read_records
from modelwright.data.tokenizer import Tokenizer
from modelwright.model.hf import load_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with packed rows and a model."""
    return run_with_rows(tmp_path_factory.mktemp("base"))


def test_a_server_and_two_clients(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With adapters whose aggregate also changes frozen weights: more is sent to clients than comes back."""
    settings, keys = tmp_path / "federated.yaml", tmp_path / "keys"
    settings.write_text(FEDEX)
    capsys.readouterr()
    assert main(["federated", "keys", "ann", "ben"]) == 0
    keys.write_text(capsys.readouterr().out)
    keys.chmod(0o600)
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "notes.txt").write_text("not the client's")
    train_with_commands(base, settings, keys, tmp_path)
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
