"""Runs that train on the packed rows of another run, in a folder or on a store, with and without the cache."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.artifacts import read_manifest
from modelwright.core.records import column, read_records
from own_tiers import open_tiers, use_own_memory
from rank_processes import start_process

pytestmark = pytest.mark.slow

Command = Callable[..., Any]
PRETRAINED = "tokenize,pack,pretrain"
TRAINED = f"{PRETRAINED},sft"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, small_words: tuple[str, ...]) -> Path:
    """A run with packed rows that has trained on them, too."""
    run = tmp_path_factory.mktemp("source") / "run"
    stages = "clean,tokenize,pack,pretrain,sft"
    code, _, errors = start_process("modelwright.cli.main", *small_words, "--stages", stages, "--run-dir", run).end()
    assert code == 0, errors
    return run


@pytest.fixture(scope="module")
def store(source: Path, s3: Any) -> str:
    """The address of a copy of that run on a local S3-compatible server."""
    s3.mkdir("runs")
    for name in ("config.yaml", "clean/artifact", "tokenize/artifact", "pack/artifact"):
        s3.put(str(source / name), f"runs/source/{name}", recursive=True)
    return "s3://runs/source"


def weights(run: Path, *stages: str) -> list[str]:
    """Hashes of the weights of these stages, or of both trainings."""
    files = [run / stage / "artifact" / "model.safetensors" for stage in stages or ("pretrain", "sft")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def losses(run: Path, stage: str = "pretrain") -> list[tuple[float, float]]:
    return column(read_records(run / stage / "metrics.jsonl"), "loss")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_own_memory(tmp_path / "memory", monkeypatch)


def cached(folder: Path) -> list[str]:
    return ["--cache.enabled", "true", "--cache.folder", str(folder)]


@pytest.mark.slow
def test_the_same_weights_from_a_folder_with_and_without_a_cache(
    inside: Command, tmp_path: Path, memory: Path, source: Path, small_words: tuple[str, ...]
) -> None:
    from_folder = ["--rows_from", str(source), "--stages", TRAINED]
    for name, words in {"mapped": from_folder, "cached": [*from_folder, *cached(tmp_path / "disk")]}.items():
        done = inside(*small_words, *words, "--run-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert weights(tmp_path / name) == weights(source)
        assert losses(tmp_path / name) == losses(source)
        assert list((tmp_path / name).glob("pack/artifact/*/heldout/tokens-*"))
        assert not list((tmp_path / name).glob("pack/artifact/*/train/tokens-*")), "training rows are not copied"
    done = inside(*small_words, *from_folder, "--run-dir", str(tmp_path / "cached"))
    assert "kept     tokenize, pack, pretrain, sft" in done.stdout, "the cache decides nothing that is learned"
    facts = read_manifest(tmp_path / "cached" / "sft" / "artifact").facts["row_cache"]
    assert facts["num_rows"] > 0
    assert sum(facts["blocks"].values()) > 0
    assert not read_manifest(tmp_path / "mapped" / "sft" / "artifact").facts["row_cache"]
    assert not list((tmp_path / "disk").iterdir())
    assert not list(memory.iterdir())


def test_the_own_rows_through_the_cache(
    inside: Command, tmp_path: Path, memory: Path, source: Path, small_words: tuple[str, ...]
) -> None:
    words = ["--stages", f"clean,{PRETRAINED}", "--cache.enabled", "true", "--run-dir", str(tmp_path / "run")]
    done = inside(*small_words, *words)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run", "pretrain") == weights(source, "pretrain")
    assert sum(value for _, value in column(read_records(tmp_path / "run/pretrain/metrics.jsonl"), "cache/wait_s")) > 0
    assert not list(memory.iterdir())


@pytest.mark.slow
def test_the_same_weights_from_a_store(
    inside: Command, tmp_path: Path, source: Path, store: str, small_words: tuple[str, ...]
) -> None:
    words = ["--rows_from", f"{store}/", *cached(tmp_path / "disk"), "--stages", f"clean,{TRAINED},evaluate,report"]
    done = inside(*small_words, *words, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == weights(source)
    records = read_records(tmp_path / "run" / "pretrain" / "metrics.jsonl")
    assert sum(value for _, value in column(records, "cache/source_bytes")) > 0
    assert len(column(records, "cache/wait_s")) == 12
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Row cache" in page
    assert f"From {store}" in page
    again = inside(*small_words, *words, "--run-dir", str(tmp_path / "run"))
    assert again.returncode == 0, again.stderr
    assert "kept     clean, tokenize, pack, pretrain, sft, evaluate" in again.stdout, "nothing is done twice"


def test_a_flipped_byte_on_the_store_stops_the_run_with_its_name(
    inside: Command, tmp_path: Path, store: str, s3: Any, small_words: tuple[str, ...]
) -> None:
    name = "runs/source/pack/artifact/pretrain/train/tokens-00000.bin"
    content = bytearray(s3.cat_file(name))
    flipped = bytearray(content)
    flipped[77] ^= 1
    words = [*small_words, "--rows_from", store, "--stages", PRETRAINED, "--run-dir", str(tmp_path / "run")]
    s3.pipe_file(name, bytes(flipped))
    done = inside(*words)
    s3.pipe_file(name, bytes(content))
    assert done.returncode == 2
    assert f"{store}/pack/artifact/pretrain/train: bytes 0 to " in done.stderr
    assert "of tokens-00000.bin are damaged" in done.stderr


def test_killed_while_rows_are_cached(tmp_path: Path, source: Path, small_words: tuple[str, ...]) -> None:
    words = [*small_words, "--rows_from", str(source), "--stages", PRETRAINED, *cached(tmp_path / "disk")]
    run = tmp_path / "run"
    metrics = run / "pretrain" / "metrics.jsonl"
    started = start_process("modelwright.cli.main", *words, "--run-dir", run)
    tiers = set[Path]()
    while started.is_alive and not (metrics.exists() and len(losses(run)) > 4):
        tiers |= open_tiers(started.pid)
        time.sleep(0.01)
    started.process.kill()
    code, *_ = started.end()
    assert code < 0, "it was at work"
    assert len(tiers) == 2, "in memory and on the disk"
    assert list((tmp_path / "disk").iterdir())
    code, _, errors = start_process("modelwright.cli.main", *words, "--run-dir", run).end()
    assert code == 0, errors
    assert weights(run, "pretrain") == weights(source, "pretrain")
    assert losses(run) == losses(source)
    assert not any(path.exists() for path in tiers)
    assert not list((tmp_path / "disk").iterdir())


def test_rows_that_do_not_fit_are_refused(
    inside: Command, tmp_path: Path, source: Path, small_words: tuple[str, ...]
) -> None:
    from_folder = ["--rows_from", str(source), "--stages", TRAINED]
    for number, (words, problem) in enumerate(
        [
            (["--rows_from", str(tmp_path), "--stages", TRAINED], f"the stage tokenize of {tmp_path} is not finished"),
            (["--rows_from", "nowhere://x", "--stages", TRAINED], "rows_from: nowhere://x is not a usable URL"),
            (
                [*from_folder, "--pack.seq_len=64"],
                f"pack.seq_len: is 64, but the rows of {source} were packed with 128",
            ),
            ([*from_folder, "--pack.chat_loss=all"], "pack.chat_loss: is all, but the rows"),
            (["--rows_from", str(source), "--stages", f"{TRAINED},dpo"], "lacks the rows of preference pairs that dpo"),
            ([*from_folder, "--cache.disk_bytes=5"], "cache.folder: is empty, but disk_bytes is set"),
        ]
    ):
        done = inside(*small_words, *words, "--run-dir", str(tmp_path / f"run{number}"))
        assert done.returncode == 2, done.stderr
        assert problem in done.stderr, done.stderr


def test_rows_of_a_run_that_is_older_than_a_setting(
    inside: Command, tmp_path: Path, source: Path, small_words: tuple[str, ...]
) -> None:
    older = shutil.copytree(source, tmp_path / "older")
    config = (older / "config.yaml").read_text()
    assert "  text_kinds:\n  - prose\n  - code\n" in config
    (older / "config.yaml").write_text(config.replace("  text_kinds:\n  - prose\n  - code\n", ""))
    words = ["--rows_from", str(older), "--stages", TRAINED, "--pack.text_kinds", "[prose, code, qa]"]
    done = inside(*small_words, *words, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "pack.text_kinds: is ['prose', 'code', 'qa'], but the rows of" in done.stderr


def test_other_rows_are_another_run(
    inside: Command, tmp_path: Path, source: Path, small_words: tuple[str, ...]
) -> None:
    words = [*small_words, "--stages", "tokenize,pack", "--run-dir", str(tmp_path / "run")]
    assert inside(*words, "--rows_from", str(source)).returncode == 0
    os.symlink(source, tmp_path / "other")
    done = inside(*words, "--rows_from", str(tmp_path / "other"))
    assert done.returncode == 2
    assert f"rows_from: was {source}, now {tmp_path / 'other'}" in done.stderr
