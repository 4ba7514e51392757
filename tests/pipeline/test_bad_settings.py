"""Settings, paths and files of a run directory that cannot be right: one line that names them, exit code 2."""

import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.artifacts import RunDir, read_attempts, save_yaml, write_artifact
from modelwright.core.config import ConfigError, load_yaml
from modelwright.core.progress import SilentProgress
from modelwright.core.resources import num_usable_cores
from modelwright.pipeline import resolve
from modelwright.pipeline.stage import HardwareConfig
from modelwright.recipes.load import load, recipe

Command = Callable[..., subprocess.CompletedProcess[str]]


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("modelwright: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"recipe: tiny\npretrain: 5\n", "pretrain: expected a mapping, got 5"),
        (b"recipe: tiny\nsft: [1, 2]\n", "sft: expected a mapping, got [1, 2]"),
        (b"recipe: tiny\npretrain: {precision: 7}\n", "pretrain.precision: expected a mapping, got 7"),
        (b"recipe: tiny\npretrain: {precision: {policy: [fp32]}}\n", "pretrain.precision.policy: ['fp32'] is not one"),
        (b"recipe: tiny\nmodel: deep\n", "model: expected a mapping, got 'deep'"),
        (b"recipe: tiny\ndata: [a.txt]\n", "data: expected a mapping, got ['a.txt']"),
        (b"recipe: tiny\nstages: {a: 1}\n", "stages[0]: {'a': 1} is not one of"),
        (b"recipe: tiny\npretrain:\n", "pretrain: expected a mapping, got None"),
        (b"recipe: [tiny]\n", "recipe: ['tiny'] is not one of"),
        (b"recipe: {tiny: 1}\n", "recipe: {'tiny': 1} is not one of"),
        (b"recipe: tiny\nname: caf\xe9\n", "is not valid YAML"),
        (b"recipe: tiny\nname: 2001-13-45\n", "is not valid YAML (month must be in 1..12)"),
        (b'recipe: tiny\nname: "a\\0b"\n', "must be usable as a folder name"),
        (b"[" * 5000, "is nested too deeply"),
        (b"recipe: tiny\nmodel: {model_dim: -64}\n", "model.model_dim: must be at least 1"),
        (b"recipe: tiny\nserve: {max_wait: 5}\n", "serve.max_wait: unknown setting; did you mean 'max_wait_s'?"),
        (b"recipe: tiny\nhardware: {num_threads: 100000000}\n", "hardware.num_threads: must be from 0"),
        (b"recipe: tiny\nmodel: {num_layers: 100000000}\n", "lower model.model_dim (64), model.num_layers (100000000)"),
        (b"recipe: tiny\nmodel: {model_dim: 100000000}\n", "lower model.model_dim (100000000)"),
    ],
)
def test_a_file_that_cannot_be_right(inside: Command, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert_one_line(inside("run", str(path), "--dry-run", "--run-dir", str(tmp_path / "run")), message)
    assert [found.name for found in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("words", [("run", "tiny", "--dry-run"), ("run", "tiny")])
def test_no_more_threads_than_cores(inside: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = inside(*words, "--hardware.num_threads", "999", "--run-dir", str(tmp_path / "run"))
    assert_one_line(done, f"hardware.num_threads: must be at most {num_usable_cores()}", "got 999; 0 is every core")


def test_a_run_goes_on_where_there_are_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = replace(recipe("tiny"), hardware=HardwareConfig(device="cpu", num_threads=64))
    monkeypatch.setattr(resolve, "num_usable_cores", lambda: 2)
    config = load("tiny", {"hardware": {"num_threads": 0}}).config
    assert resolve.resolve(config, previous, SilentProgress()).hardware.num_threads == 2


@pytest.mark.parametrize("command", [("run", "--dry-run"), ("run",), ("config",), ("doctor",), ("plan", "memory")])
def test_every_command_refuses_a_section_that_is_a_number(
    inside: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: tiny\npretrain: 5\n")
    words = (command[0], str(path), *command[1:]) if command[0] != "plan" else (*command, str(path))
    assert_one_line(inside(*words), "pretrain: expected a mapping, got 5")


@pytest.mark.parametrize("size", [("--model.model_dim", "100000000"), ("--model.num_layers", "100000000")])
def test_a_model_that_the_machine_cannot_hold(inside: Command, tmp_path: Path, size: tuple[str, str]) -> None:
    for words in (["--dry-run"], []):
        done = inside("run", "tiny", *size, "--run-dir", str(tmp_path / "run"), *words)
        assert_one_line(done, "model: its", "parameters take", size[0].removeprefix("--") + f" ({size[1]})")
    assert not (tmp_path / "run" / "clean").exists()


def test_planning_a_model_that_cannot_be_measured(inside: Command, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("recipe: tiny\nmodel: {model_dim: 100000000}\n")
    assert_one_line(inside("plan", "layout", str(path)), "--flops: the model's largest matrix")
    assert_one_line(
        inside("plan", "layout", str(path), "--top", "0", "--flops", "1e12"), "--top: must be at least 1, got 0"
    )


@pytest.mark.parametrize("words", [["--dry-run"], [], ["--nproc", "2"]])
def test_a_device_that_is_not_there(
    inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    done = inside("run", "tiny", "--hardware.device", "cuda", "--run-dir", str(tmp_path / "run"), *words)
    assert_one_line(done, "hardware.device: PyTorch finds no CUDA device on this machine; choose cpu or auto")


def test_a_survey_of_a_device_that_is_not_there(
    inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "gpu.yaml").write_text("recipe: tiny\nhardware: {device: cuda}\n")
    assert_one_line(inside("doctor", str(tmp_path / "gpu.yaml")), "hardware.device: PyTorch finds no CUDA device")


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "file is a file, not a folder; choose another one"),
        ("file/below", "file, which is a file, not a folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be_one(
    inside: Command, tmp_path: Path, place: str, message: str, dry: list[str]
) -> None:
    (tmp_path / "file").write_text("text")
    assert_one_line(inside("run", "tiny", "--run-dir", str(tmp_path / place), *dry), "--run-dir: ", message)
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_that_cannot_be_made(inside: Command) -> None:
    done = inside("run", "tiny", "--run-dir", "/proc/no-such")
    assert_one_line(done, "/proc/no-such: cannot be created", "choose another folder")


def test_an_export_never_replaces_a_file(inside: Command, tmp_path: Path) -> None:
    run, file = RunDir(tmp_path / "run").create(), tmp_path / "file"
    file.write_text("text")
    run.write_info({"invocations": [], "stages": {}})
    save_yaml(run.config, recipe("tiny"))
    with write_artifact(run.stage("sft").artifact, kind="sft", digest="") as draft:
        (draft.path / "config.json").write_text("{}")
    for more in ([], ["--overwrite"]):
        assert_one_line(inside("export", str(run.path), "--to", "hf", str(file), *more), "file: is a file")
    assert file.read_text() == "text"
    done = inside("export", str(run.path), "--to", "hf", "/dev/null/below")
    assert_one_line(done, "/dev/null/below.partial: cannot be created (Not a directory)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lr-find", "tiny", "--max-lr", "inf"), "--min-lr: must be above 0 and below --max-lr, both finite"),
        (("doctor", "tiny", "--seconds", "nan"), "--seconds: must be above 0"),
        (("doctor", "tiny", "--seconds", "-1"), "--seconds: must be above 0"),
    ],
)
def test_numbers_that_measure_nothing(inside: Command, words: tuple[str, ...], message: str) -> None:
    assert_one_line(inside(*words), message)


def test_the_range_test_needs_a_folder(inside: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(inside("lr-find", "tiny", "--out", str(tmp_path / "file")), "--out: ", "is a file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"pretrain: 5\n", "config.yaml: pretrain: expected a mapping, got 5; mend or remove it"),
        (b"name: caf\xe9\n", "is not valid YAML"),
        (b"", "expected a mapping of settings"),
        (b"{}", "name: is required and lacks a default"),
        (None, "config.yaml: cannot be read (Is a directory); mend or remove it"),
    ],
)
def test_a_damaged_config_of_a_run(inside: Command, tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is None:
        (tmp_path / "config.yaml").mkdir()
    else:
        (tmp_path / "config.yaml").write_bytes(content)
    for words in (["--dry-run"], [], ["--stages", "clean"]):
        assert_one_line(inside("run", "tiny", "--run-dir", str(tmp_path), *words), message, "config.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"invocations": 3, "stages": {}}', b"\xff", None])
def test_a_damaged_record_of_a_run_is_written_anew(inside: Command, tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "source.txt"
    words = [f"{a}{b}" for a in ("the ", "a ", "of ") for b in ("wolf", "river", "house", "letter", "storm", "king")]
    source.write_text("\n".join(" ".join(random.Random(n).choices(words, k=9)) + f" {n}." for n in range(3000)))
    words = ("run", "tiny", "--data.sources", str(source), "--stages", "clean", "--run-dir", str(tmp_path / "run"))
    for path in (tmp_path / "run" / "run.json", tmp_path / "run" / "clean" / "stage.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
    (tmp_path / "run" / "clean" / "artifact").mkdir()
    (tmp_path / "run" / "clean" / "artifact" / "manifest.json").write_bytes(content or b"3")
    assert inside(*words).returncode == 0
    assert RunDir(tmp_path / "run").read_info()["invocations"][-1]["state"] == "done"
    assert [attempt["state"] for attempt in read_attempts(RunDir(tmp_path / "run").stage("clean"))] == ["done"]


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An open folder, and a process that file permissions hold for, also where the tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        monkeypatch.chdir(name)  # pytest's own folder may be closed to it
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def test_files_that_may_not_be_read_or_written(inside: Command, unprivileged: Path) -> None:
    closed, config = unprivileged / "closed", unprivileged / "run" / "config.yaml"
    closed.mkdir(mode=0o500)
    config.parent.mkdir()
    config.write_text("name: tiny\n")
    config.chmod(0)
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read \(Permission denied\)"):
        load_yaml(config)
    done = inside("run", "tiny", "--run-dir", str(config.parent), "--stages", "clean")
    assert_one_line(done, "config.yaml: cannot be read (Permission denied); mend or remove it")
    assert_one_line(inside("run", str(config.parent)), "config.yaml: cannot be read (Permission denied)")
    for path in (closed, closed / "run"):
        done = inside("run", "tiny", "--run-dir", str(path), "--stages", "clean")
        assert_one_line(done, str(closed), "cannot be written (Permission denied)")
