"""Experiment trackers: the real libraries without a network, and sinks that fail or hang beside a training."""

import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from modelwright.core import sinks as queued
from modelwright.core.records import column, read_records
from modelwright.core.sinks import (
    SINKS,
    SinkSpec,
    SinkStart,
    Tracking,
    TrackingConfig,
    accepted,
    flat,
    require_packages,
)
from modelwright.pipeline.stages import training
from modelwright.recipes.load import load
from refusals import config_error

SECRET = "hunter2-in-a-url"
NUM_STEPS = 6
SETTINGS = {"learning_rate": 1e-2, "schedule": {"kind": "cosine"}}
OWN_WARNINGS = pytest.mark.filterwarnings("default")
"""The libraries use what other libraries are about to remove."""
TRACKED = Tracking(run="quiet-otter", settings={"sft": SETTINGS})


class Broken:
    """Raises at one of its moments."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.at("open")

    def at(self, moment: str) -> None:
        if moment == self.when:
            raise ConnectionError(f"no server at http://me:{SECRET}@host/\nat {moment}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.at("write" if step < 4 else "later write")

    def close(self) -> None:
        self.at("close")


class Notes(tiny_run.SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.texts.append(text)


def trained(folder: Path, *names: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights, and what the user was told."""
    notes = Notes()
    tracking = Tracking(report_to=names, run=TRACKED.run, settings=TRACKED.settings)
    settings = tiny_run.settings(num_steps=NUM_STEPS, keep_best=False)
    tiny_run.run(folder, settings, tracking=tracking, progress=notes)
    return tiny_run.final_weights(folder, NUM_STEPS), notes.texts


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[str]]:
    return trained(tmp_path_factory.mktemp("without"))


def add_sink(monkeypatch: pytest.MonkeyPatch, open_sink: Callable[[SinkStart], Any]) -> None:
    monkeypatch.setattr(queued, "SINKS", (*SINKS, SinkSpec(name="test", open=open_sink)))


def history(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    return column(read_records(folder / "metrics.jsonl"), name)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["open", "write", "later write", "close"])
def test_a_sink_that_raises_never_stops_a_training(
    when: str, without: tuple[dict[str, torch.Tensor], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The weights are those of a run without it, every record is in the file, and the user is told once."""
    expected, silence = without
    add_sink(monkeypatch, lambda start: Broken(when))
    weights, notes = trained(tmp_path / "with", "test")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.items())
    assert [step for step, _ in history(tmp_path / "with")] == list(range(1, NUM_STEPS + 1))
    added = [text for text in notes if text not in silence]
    why = "ConnectionError: no server at http://***@host/"
    assert added == [f"test: failed and gets nothing more ({why}); metrics.jsonl has it all"]


def test_a_sink_that_hangs_holds_no_training_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(queued, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(queued, "MAX_WAITING", 3)
    over = threading.Event()
    add_sink(monkeypatch, lambda start: over.wait(60))
    _, notes = trained(tmp_path, "test")
    over.set()
    assert "test: does not answer; metrics.jsonl has what it lacks" in notes
    assert len(history(tmp_path)) == NUM_STEPS


def test_a_slow_sink_says_how_much_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(queued, "MAX_WAITING", 3)
    begin, told = threading.Event(), []

    def open_sink(start: SinkStart) -> Broken:
        begin.wait(60)
        return Broken("never")

    start = SinkStart(run="", name="", folder=tmp_path)
    sink = queued.QueuedSink(SinkSpec(name="test", open=open_sink), start, told.append)
    for step in range(10):
        sink.write(step, {})
    begin.set()
    sink.close()
    assert told == ["test: was too slow for 7 records; metrics.jsonl has them"]


@pytest.mark.slow
@OWN_WARNINGS
def test_mlflow_has_the_numbers_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MLflow's own SQLite file, read by MLflow's own client."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'modelwright[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "argv", ["modelwright", f"https://u:{SECRET}@host/"])
    _, notes = trained(tmp_path, "mlflow")
    assert not [text for text in notes if "mlflow" in text]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("modelwright").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"sft.learning_rate": "0.01", "sft.schedule.kind": "cosine"}
    assert {name: run.data.tags[name] for name in ("run", "stage", "first_step")} == {
        "run": "quiet-otter", "stage": "tiny", "first_step": "1",
    }  # fmt: skip
    for name in ("loss", "heldout_loss"):
        logged = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        assert sorted(logged) == history(tmp_path, name)
    assert_no_secret(tmp_path)


@OWN_WARNINGS
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("pretrain.precision.rules.layers.*.ffn", "pretrain.precision.rules.layers._2a.ffn"),
        ("rewards/right answer (Python)/mean", "rewards/right answer _28Python_29/mean"),
        ("weights.s3://texts/../old/", "weights.s3:/_2ftexts/_2e_2e/old_2f"),
        ("/a/./b", "_2fa/_2e/b"),
        ("loss/\u5b57", "loss/_5b57"),
        ("heldout_loss/python:stdlib", "heldout_loss/python:stdlib"),
    ],
)
def test_mlflow_takes_every_name(name: str, shown: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation", reason="MLflow is not installed")
    assert accepted(name) == shown
    validation._validate_metric_name(accepted(name))
    validation._validate_param_name(accepted(name))


@pytest.mark.slow
@OWN_WARNINGS
def test_wandb_has_the_numbers_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that `wandb sync` sends; without a key and without a network."""
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'modelwright[wandb]'")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    monkeypatch.setattr(sys, "argv", ["modelwright", f"https://u:{SECRET}@host/"])
    _, notes = trained(tmp_path, "wandb")
    assert not [text for text in notes if "wandb" in text]
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged: dict[str, list[tuple[int, float]]] = {"loss": [], "heldout_loss": []}
    config: dict[str, str] = {}
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record.FromString(data)
        items = {one.key or ".".join(one.nested_key): one.value_json for one in record.history.item}
        for name in logged.keys() & items.keys():
            logged[name].append((int(items["_step"]), float(items[name])))
        config |= {one.key: one.value_json for one in record.run.config.update}
    assert logged == {name: history(tmp_path, name) for name in logged}
    assert config["sft.learning_rate"] == '"0.01"'
    assert_no_secret(tmp_path)


def wandb_records(file: Path) -> Iterator[bytes]:
    """The messages of an offline run: LevelDB's log format behind seven bytes of its own. Blocks of 32 KiB have pieces,
    each with a checksum (4 bytes), a length (2) and a type (1): whole, first, middle, last.
    """
    data, message, at = file.read_bytes(), b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


def assert_no_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_trackers_are_told_the_settings_without_secrets() -> None:
    """They get the model's shape and the training's own section, redacted."""
    config = load("tiny", {"pretrain": {"batching": {"curriculum": {"by": f"loss:s3://u:{SECRET}@b/"}}}}).config
    tracked = training._tracking(config, config.trainings[0])
    settings = flat(tracked.settings)
    assert settings["pretrain.batching.curriculum.by"] == "loss:s3://***@b/"
    assert settings["model.num_layers"] == str(config.model.num_layers)
    assert SECRET not in str(settings)


def test_what_is_missing_or_unknown_is_said_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with config_error("report_to"):
        TrackingConfig(report_to=("tensorboard",))
    monkeypatch.setattr(queued, "find_spec", lambda name: None)
    with config_error("tracking.report_to"):
        require_packages(TrackingConfig(report_to=("wandb",)))
    require_packages(TrackingConfig())
