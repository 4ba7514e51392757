"""Stages that learn from images, their own or of another run, with and without the cache: the same bits."""

import hashlib
import io
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from modelwright.core.artifacts import read_manifest
from modelwright.core.records import column, read_records
from modelwright.data.images.store import FILE, INDEX, ImageStore
from modelwright.data.rows.loader import PackedRows
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.folders import load_vision_tower, save_vision_tower
from modelwright.model.vision.vit import VisionTower
from own_tiers import open_tiers, use_own_memory
from rank_processes import Started, start_process

Command = Callable[..., Any]
NUM_IMAGES, SIDE, TOKEN = 90, 40, "<|image|>"
COLORS = ("red", "green", "blue")
SETS = {"vision": "labeled_images", "align": "aligned_pairs", "caption": "captions"}
"""Stages that learn from images, and their sets of rows."""
ALL = "tokenize,pack,pretrain,align,vision,caption"
BUDGETS = ("--cache.enabled", "true", "--cache.memory_bytes", "220000", "--cache.disk_bytes", "330000")
SOURCE = '''
def add_{n}(first, second):
    """Add the number {n} to the sum of both arguments."""
    total = first + second
    return total + {n}
'''


def settings(folder: Path) -> dict[str, Any]:
    """A run of some seconds on noisy images in one of three colors, with captions and labels."""
    dice, records = np.random.default_rng(0), []
    for number in range(NUM_IMAGES):
        color = number % len(COLORS)
        pixels = dice.integers(0, 190, (SIDE, SIDE, 3))
        pixels[..., color] += 60
        data = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(data, "PNG")
        (folder / f"{number}.png").write_bytes(data.getvalue())
        text = f"The picture number {number} has a lot of {COLORS[color]} points."
        records.append({"file_name": f"{number}.png", "text": text, "label": COLORS[color]})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    for number in range(20):
        (folder / f"add_{number}.py").write_text(SOURCE.format(n=number * 17))
    vision = {"image_size": 16, "patch_size": 8, "num_layers": 2, "model_dim": 16, "num_heads": 2, "ffn_dim": 24}
    steps = {"checkpoint_every_steps": 3, "eval_every_steps": 4, "keep_best": False}
    return {
        "data": {"sources": [str(folder)], "validation_fraction": 0.2},
        "clean": {"quality": {"limits": {"image.max_hash_distance": 0}}, "duplicates": {"near": False}},
        "hardware": {"device": "cpu", "num_threads": 1},
        "tokenizer": {"vocab_size": 400, "special_tokens": [TOKEN]},
        "pack": {"seq_len": 96},
        "model": {
            "vocab_size": 400, "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
            "ffn_dim": 48, "max_seq_len": 96,
        },
        "stages": ["clean", *ALL.split(","), "report"],
        "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
        "pretrain": {"num_steps": 2, "batch_tokens": 192},
        "vision_tower": vision,
        "align": {"num_steps": 8, "batch_tokens": 1536, "embed_dim": 16, **steps},
        "caption": {
            "num_steps": 8, "batch_tokens": 384, "train_tower": True, **steps,
        },
        "vision": {
            "num_steps": 32, "batch_tokens": 4 * 96, "learning_rate": 1e-2,
            "resnet": {"image_size": 8, "widths": [8, 8]},
            "augment": {"crop_padding": 1, "mixup_alpha": 0.2, "cutmix_alpha": 1.0}, **steps,
        },
    }  # fmt: skip


def start(config: Path, run: Path, *words: object) -> Started:
    return start_process("modelwright.cli.entry", "run", config, "--run-dir", run, *words)


def finish(config: Path, run: Path, *words: object) -> str:
    """What the run said on its standard error."""
    code, _, errors = start(config, run, *words).end()
    assert code == 0, errors
    return errors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration, and a run that has trained without the cache."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "images").mkdir()
    config = folder / "small.yaml"
    config.write_text(json.dumps({"name": "small", **settings(folder / "images")}))
    finish(config, folder / "run")
    return config, folder / "run"


@pytest.fixture(scope="module")
def store(source: tuple[Path, Path], s3: Any) -> str:
    """The address of a copy of that run on a local S3-compatible server."""
    s3.mkdir("image-runs")
    for name in ("config.yaml", "clean/artifact", "tokenize/artifact", "pack/artifact"):
        s3.put(str(source[1] / name), f"image-runs/source/{name}", recursive=True)
    return "s3://image-runs/source"


def weights(run: Path, stage: str) -> dict[str, str]:
    files = sorted((run / stage / "artifact").rglob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_own_memory(tmp_path / "memory", monkeypatch)


def assert_same(run: Path, source: Path, *stages: str) -> None:
    for stage in stages:
        assert weights(run, stage)
        assert weights(run, stage) == weights(source, stage), stage
        ours, theirs = (read_manifest(one / stage / "artifact").facts for one in (run, source))
        for name in ("heldout_loss", "heldout_images", "retrieval", "captions"):
            assert _without_times(ours.get(name)) == _without_times(theirs.get(name)), (stage, name)


def _without_times(facts: Any) -> Any:
    return {name: one for name, one in facts.items() if not name.endswith("_s")} if isinstance(facts, dict) else facts


def image_files(run: Path) -> list[str]:
    """Where images lie in the artifact of the stage pack."""
    folder = run / "pack" / "artifact"
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob(FILE))


@pytest.mark.slow
def test_the_source_has_images_of_many_blocks(source: tuple[Path, Path]) -> None:
    for name in SETS.values():
        assert (source[1] / "pack" / "artifact" / name / "images-train" / FILE).stat().st_size > 4 * 2**16
    assert len(image_files(source[1])) == 6


@pytest.mark.slow
def test_own_images_through_the_cache(inside: Command, source: tuple[Path, Path], tmp_path: Path, memory: Path) -> None:
    config, plain = source
    run = tmp_path / "run"
    done = inside("run", str(config), "--run-dir", str(run), *BUDGETS, "--cache.folder", str(tmp_path / "disk"))
    assert done.returncode == 0, done.stderr
    assert_same(run, plain, *SETS)
    for stage, name in SETS.items():
        artifact = run / "pack" / "artifact" / name
        num_bytes = (artifact / "images-train" / FILE).stat().st_size
        num_bytes += sum(path.stat().st_size for path in (artifact / "train").glob("*-00000.bin"))
        assert f"cache: {num_bytes:,} bytes of rows and images" in done.stderr
        facts = read_manifest(run / stage / "artifact").facts["row_cache"]
        assert facts["bytes"]["source"] > num_bytes / 2
        records = read_records(run / stage / "metrics.jsonl")
        assert sum(value for _, value in column(records, "cache/wait_s")) > 0
    facts = read_manifest(run / "vision" / "artifact").facts["row_cache"]
    assert 32 * 4 < facts["num_rows"] <= 2 * 32 * 4, "rows and images"
    assert facts["blocks"]["memory"] > 0
    assert not list((tmp_path / "disk").iterdir())
    assert not list(memory.iterdir())
    page = (run / "report.html").read_text()
    assert "Row cache" in page


class Unread:
    """A reader of rows or images that nobody may use."""

    def read(self, items: np.ndarray) -> Any:
        raise AssertionError("training data was read past the cache")


def forbid_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but the cache read training rows and their images."""
    begin_rows, begin_images = PackedRows.__init__, ImageStore.__init__

    def without_rows(rows: PackedRows, folder: Path, reader: Any = None) -> None:
        begin_rows(rows, folder, reader or (Unread() if folder.name == "train" else None))

    def without_images(store: ImageStore, folder: Path, reader: Any = None, *, num_ahead: int = 0) -> None:
        begin_images(
            store, folder, reader or (Unread() if folder.name == "images-train" else None), num_ahead=num_ahead
        )

    monkeypatch.setattr(PackedRows, "__init__", without_rows)
    monkeypatch.setattr(ImageStore, "__init__", without_images)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [BUDGETS, ()], ids=["cache", "reading ahead alone"])
def test_the_same_weights_from_a_store(
    inside: Command, source: tuple[Path, Path], store: str, tmp_path: Path, cache: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Training images stay there. With the cache, the baselines of the reports read through it as well."""
    config, plain = source
    if cache:
        forbid_other_readers(monkeypatch)
    disk = ["--cache.folder", str(tmp_path / "disk")] if cache else []
    words = ["--rows_from", store, "--stages", ALL, *cache, *disk]
    done = inside("run", str(config), "--run-dir", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", plain, *SETS)
    assert image_files(tmp_path / "run") == sorted(f"{name}/images-heldout" for name in SETS.values())
    for stage in SETS:
        assert read_manifest(tmp_path / "run" / stage / "artifact").facts["row_cache"]["bytes"]["source"] > 0


@pytest.mark.slow
def test_images_of_a_folder_stay_there(inside: Command, source: tuple[Path, Path], tmp_path: Path) -> None:
    config, plain = source
    words = ["--rows_from", str(plain), "--stages", "tokenize,pack,vision"]
    done = inside("run", str(config), "--run-dir", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", plain, "vision")
    assert not [name for name in image_files(tmp_path / "run") if name.endswith("train")]


@pytest.fixture
def flipped(store: str, s3: Any) -> Iterator[str]:
    """The address of a run on the store with a flipped byte in the training images."""
    name = f"{store.removeprefix('s3://')}/pack/artifact/labeled_images/images-train/{FILE}"
    content = s3.cat_file(name)
    changed = bytearray(content)
    changed[2**16 + 5] ^= 1
    s3.pipe_file(name, bytes(changed))
    yield store
    s3.pipe_file(name, content)


@pytest.mark.slow
def test_a_flipped_byte_on_the_store_stops_the_run_with_its_name(
    inside: Command, source: tuple[Path, Path], flipped: str, tmp_path: Path
) -> None:
    words = ["--rows_from", flipped, "--stages", "tokenize,pack,vision", *BUDGETS, "--cache.folder", str(tmp_path)]
    done = inside("run", str(source[0]), "--run-dir", str(tmp_path / "run"), *words)
    assert done.returncode == 2
    place = f"{flipped}/pack/artifact/labeled_images/images-train"
    assert f"{place}: bytes 65,536 to 131,072 of {FILE} are damaged" in done.stderr


@pytest.mark.slow  # for the run that all tests of this file take
def test_images_without_checksums_are_refused_before_anything_is_trained(
    inside: Command, source: tuple[Path, Path], tmp_path: Path
) -> None:
    """As an older version has packed them."""
    config, plain = source
    manifest = json.loads((plain / "pack/artifact/manifest.json").read_text())
    older = tmp_path / "older"
    for name in ("tokenize", "pack"):
        shutil.copytree(plain / name, older / name)
    shutil.copy(plain / "config.yaml", older)
    for name in [one for one in manifest["files"] if one.endswith(f"images-train/{INDEX}")]:
        del manifest["files"][name]
        (older / "pack/artifact" / name).unlink()
    (older / "pack/artifact/manifest.json").write_text(json.dumps(manifest))
    words = ["--rows_from", str(older), "--stages", "tokenize,pack,vision"]
    done = inside("run", str(config), "--run-dir", str(tmp_path / "run"), *words)
    assert done.returncode == 2
    assert f"{older}/pack/artifact/aligned_pairs/images-train: the images lack checksums; remove the" in done.stderr


@pytest.mark.slow
def test_killed_while_images_are_cached(source: tuple[Path, Path], tmp_path: Path) -> None:
    config, plain = source
    run, tiers = tmp_path / "run", set[Path]()
    words = ["--rows_from", plain, "--stages", "tokenize,pack,vision", *BUDGETS, "--cache.folder", tmp_path / "disk"]
    metrics = run / "vision" / "metrics.jsonl"
    process = start(config, run, *words)
    while process.is_alive and not (metrics.exists() and len(column(read_records(metrics), "loss")) > 4):
        tiers |= open_tiers(process.pid)
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL, "the run ended before it could be killed"
    assert len(tiers) == 2, "in memory and on the disk"
    assert list((tmp_path / "disk").iterdir())
    finish(config, run, *words)
    assert_same(run, plain, "vision")
    losses = [column(read_records(one / "vision" / "metrics.jsonl"), "loss") for one in (run, plain)]
    assert losses[0] == losses[1]
    assert not any(path.exists() for path in tiers)
    assert not list((tmp_path / "disk").iterdir())


def tiers_of_children(process: Started) -> list[set[Path]]:
    """The tiers that each child of a process is using, for those that use any."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):  # it has ended meanwhile
        return [tiers for child in path.read_text().split() if (tiers := open_tiers(int(child)))]
    return []


@pytest.mark.slow
def test_two_processes_of_a_run_share_the_tiers(source: tuple[Path, Path], tmp_path: Path) -> None:
    """One folder in memory and one on the disk, which both have open; and the weights of two without a cache."""
    config, plain = source
    words = ["--rows_from", plain, "--stages", "tokenize,pack,vision", "--nproc", "2"]
    finish(config, tmp_path / "plain", *words)
    process = start(config, tmp_path / "run", *words, *BUDGETS, "--cache.folder", tmp_path / "disk")
    seen: list[set[Path]] = []
    while process.is_alive:
        now = tiers_of_children(process)
        seen = now if sum(map(len, now)) >= sum(map(len, seen)) and len(now) == 2 else seen
        time.sleep(0.01)
    code, _, errors = process.end()
    assert code == 0, errors
    assert len(seen) == 2, "two processes trained"
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    assert not any(path.exists() for path in seen[0])
    assert weights(tmp_path / "run", "vision") == weights(tmp_path / "plain", "vision")
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["vision", "align"])
def test_a_stage_starts_from_the_vision_tower_of_a_folder(
    inside: Command, source: tuple[Path, Path], tmp_path: Path, stage: str
) -> None:
    """With a rate at which nothing moves, the artifact has its weights; another tower is another stage."""
    config, plain = source
    shape = VisionConfig(image_size=16, patch_size=4, num_layers=1, model_dim=24, num_heads=3, ffn_dim=40)
    words = ["--rows_from", str(plain), "--stages", f"tokenize,pack,{stage}", f"--{stage}.num_steps", "1"]
    words += [f"--{stage}.learning_rate", "1e-12", *(["--vision.architecture", "vit"] if stage == "vision" else [])]
    for number in range(2):
        torch.manual_seed(number)
        tower, folder = VisionTower(shape), tmp_path / "tower"
        save_vision_tower(tower, folder)
        done = inside(
            "run", str(config), "--run-dir", str(tmp_path / "run"), *words, "--vision_tower.init_from", str(folder)
        )
        assert done.returncode == 0, done.stderr
        artifact = tmp_path / "run" / stage / "artifact"
        if stage == "align":
            found = load_vision_tower(artifact / "vision").state_dict()
        else:
            (file,) = artifact.glob("*.safetensors")
            found = {name.removeprefix("tower."): one for name, one in load_file(file).items()}
        for name, weight in tower.state_dict().items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-9)
