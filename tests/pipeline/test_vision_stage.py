"""The stage vision from image files to its artifact; killed and repeated, it ends with the same bits."""

import hashlib
import io
import json
import math
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cleaned import keep_all
from modelwright.compress.int8 import GridLinear
from modelwright.core.artifacts import read_manifest
from modelwright.core.config import ConfigError, DataError, ModelError
from modelwright.data.document import Document
from modelwright.data.images.decode import StoredImage, encode
from modelwright.data.images.store import ImageStore, LabeledImages, class_of, write_images, write_labels
from modelwright.data.rows.loader import PackedRows
from modelwright.data.sources.corpora import digit_images
from modelwright.model.vision.classifier import BatchNorm
from modelwright.objectives.image_classification import load_classifier
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.run import check_training
from modelwright.pipeline.stages import vision
from modelwright.pipeline.stages.vision import LABELED_ROWS, confusion, open_labeled, training_classes
from modelwright.recipes.load import load
from rank_processes import Started, start_process
from refusals import config_error

pytestmark = pytest.mark.slow

NUM_IMAGES = 80


def settings(folder: Path) -> dict[str, Any]:
    """A run of a few seconds on 80 digits in three forms: a table of files, an archive, and images that are damaged."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    records = []
    with tarfile.open(sources / "archive.tar", "w") as archive:
        for number, document in enumerate(list(digit_images())[:NUM_IMAGES]):
            data = StoredImage.from_plain(document.meta["image"]).data
            if number % 2:
                (sources / f"{number}.png").write_bytes(data)
                records.append({"file_name": f"{number}.png", "label": document.meta["digit"]})
                continue
            for extension, content in ((".png", data), (".cls", document.meta["label"].encode())):
                member = tarfile.TarInfo(f"{number:04}{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    (sources / "cut.png").write_bytes(data[: len(data) // 2])
    (sources / "none.png").write_bytes(b"")
    records += [{"file_name": f"{name}.png", "label": 1} for name in ("cut", "none")]
    (sources / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return {
        "data": {"sources": [str(sources)], "validation_fraction": 0.2, "on_bad_record": "skip"},
        "clean": {"quality": {"limits": {"image.max_hash_distance": 0}}},
        "hardware": {"device": "cpu", "num_threads": 1},
        "tokenizer": {"vocab_size": 300},
        "pack": {"seq_len": 16},
        "model": {
            "vocab_size": 300, "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
            "ffn_dim": 48, "max_seq_len": 16,
        },
        "stages": ["clean", "tokenize", "pack", "vision", "report"],
        "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
        "vision": {
            "num_steps": 30, "batch_tokens": 256, "checkpoint_every_steps": 2, "eval_every_steps": 15,
            "learning_rate": 1e-2, "keep_best": False,
            "resnet": {"image_size": 8, "widths": [8, 8]},
            "augment": {"crop_padding": 1, "mixup_alpha": 0.2, "cutmix_alpha": 1.0},
        },
    }  # fmt: skip


def start(config: Path, run: Path) -> Started:
    return start_process("modelwright.cli.entry", "run", config, "--run-dir", run)


def run_of(folder: Path, quantization: str) -> tuple[Path, Path]:
    """The configuration, and the folder of a run that nothing disturbed."""
    config, words = folder / "small.yaml", settings(folder)
    words["vision"]["quantization"] = quantization
    config.write_text(json.dumps({"name": "small", **words}))
    code, _, errors = start(config, folder / "run").end()
    assert code == 0, errors
    return config, folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return run_of(tmp_path_factory.mktemp("images"), "none")


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that trains for integers; ranges of activations are observed in its first steps."""
    return run_of(tmp_path_factory.mktemp("integers"), "int8_static")


@pytest.mark.slow
def test_rows_hold_every_image_once_with_its_class(finished: tuple[Path, Path]) -> None:
    rows = finished[1] / "pack" / "artifact" / LABELED_ROWS.name
    labels = {StoredImage.from_plain(one.meta["image"]).digest: one.meta["label"] for one in list(digit_images())}
    found = 0
    for split in ("train", "heldout"):
        images = open_labeled(rows, split)
        assert images is not None
        assert PackedRows(rows / split).num_rows == len(images)
        for number, label in enumerate(images.labels):
            digest = StoredImage(images.store.data(number), 1, 1, 0).digest
            assert images.classes[label] == labels[digest]
        found += len(images)
    assert found == NUM_IMAGES


@pytest.mark.slow
def test_a_learning_rate_is_swept_on_images(finished: tuple[Path, Path], tmp_path: Path) -> None:
    config, run = finished
    words = ("--run-dir", run, "--steps", "20", "--min-lr", "1e-5", "--out", tmp_path)
    code, _, errors = start_process("modelwright.cli.entry", "lr-find", config, *words).end()
    assert code == 0, errors
    points = json.loads((tmp_path / "lr-find.json").read_text())["points"]
    assert points[0] == [pytest.approx(1e-5), pytest.approx(math.log(10), abs=0.5)]
    assert len(points) == 20


def test_updates_on_images_are_neither_timed_before_the_run_nor_searched(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    for command, wish, words in (
        ("run", ("--minutes", "5"), "minutes: the updates of vision cannot be timed before its rows exist"),
        ("search", (), "stages: vision learns from images, and a search compares language models"),
    ):
        process = start_process("modelwright.cli.entry", command, finished[0], "--run-dir", tmp_path / command, *wish)
        code, _, errors = process.end()
        assert code == 2
        assert words in errors


def test_damaged_images_are_counted(finished: tuple[Path, Path]) -> None:
    facts = json.dumps(dict(read_manifest(finished[1] / "clean" / "artifact").facts))
    assert "truncated image" in facts
    assert "empty image file" in facts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finished", "integers"])
def test_the_artifact_classifies_as_the_stage_did(name: str, request: pytest.FixtureRequest) -> None:
    finished: tuple[Path, Path] = request.getfixturevalue(name)
    facts = read_manifest(finished[1] / "vision" / "artifact").facts["heldout_images"]
    classifier = load_classifier(finished[1] / "vision" / "artifact")
    images = open_labeled(finished[1] / "pack" / "artifact" / LABELED_ROWS.name, "heldout")
    assert images is not None
    found = classifier.classify([images.store.data(number) for number in range(len(images))])
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert float((found.argmax(axis=1) == images.labels).mean()) == facts["accuracy"]
    assert sum(map(sum, facts["confusion"])) == facts["num_images"] == len(images)
    low, high = facts["interval"]
    assert low <= facts["accuracy"] <= high
    records = [json.loads(line) for line in (finished[1] / "vision" / "metrics.jsonl").read_text().splitlines()]
    assert [one["heldout/accuracy"] for one in records if "heldout/accuracy" in one][-1] == pytest.approx(
        facts["accuracy"]
    )
    page = (finished[1] / "report.html").read_text()
    assert "logistic regression on pixels" in page


def test_a_folder_of_another_kind_is_refused(finished: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_classifier(finished[1] / "tokenize" / "artifact")
    (tmp_path / "classifier.json").write_text('{"architecture": "resnet", "shape": {"image_size": -1}, "classes": []}')
    with pytest.raises(ModelError, match="image_size"):
        load_classifier(tmp_path)


def digests(run: Path) -> dict[str, str]:
    artifact = run / "vision" / "artifact"
    files = sorted([*artifact.rglob("*.safetensors"), *artifact.glob("quantization.json")])
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def last_checkpoint(run: Path) -> int:
    names = [path.name for path in (run / "vision" / "checkpoints").glob("step-*") if not path.suffix]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("finished", [4]), ("integers", [2, 16])])
def test_a_killed_run_ends_with_the_same_bits(name: str, steps: list[int], request: pytest.FixtureRequest) -> None:
    """Of a run that trains for integers once while ranges are observed, and once while factors are rounded."""
    config, undisturbed = request.getfixturevalue(name)
    run = config.parent / "cut"
    for step in steps:
        process = start(config, run)
        while process.is_alive and last_checkpoint(run) < step:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL, "the run ended before it could be killed"
        assert not (run / "vision" / "artifact" / "manifest.json").exists()
    code, _, errors = start(config, run).end()
    assert code == 0, errors
    assert len(digests(run)) == (1 if name == "finished" else 3)
    assert digests(run) == digests(undisturbed)


@pytest.mark.slow
def test_the_integers_are_those_of_the_training(integers: tuple[Path, Path]) -> None:
    """Batch norms are folded, every convolution but the first has codes, and images get the classes that they got from
    rounded factors in the last evaluation of the training.
    """
    artifact = integers[1] / "vision" / "artifact"
    classifier = load_classifier(artifact)
    modules = dict(classifier.model.named_modules())
    assert not any(isinstance(one, BatchNorm) for one in modules.values())
    layers = {name: one for name, one in modules.items() if isinstance(one, GridLinear)}
    assert len(layers) == 2 * 2 + 1  # two blocks, and the projection of the second
    assert {one.inputs.kind for one in layers.values()} == {"tensor"}
    assert all(one.inputs.least == 0 < one.inputs.most for one in layers.values())  # after a ReLU
    assert all(one.quantized.dtype == torch.int8 and one.scale.shape == (8,) for one in layers.values())
    facts = read_manifest(artifact).facts["quantization"]
    assert facts["integer_bytes"] < 0.5 * facts["float_bytes"]
    assert 0 <= facts["float_accuracy"] <= 1
    assert "Convolutions and projections are integers" in (integers[1] / "report.html").read_text()
    (artifact / "quantization.json").rename(artifact / "moved.json")
    try:
        with pytest.raises(ModelError, match=r"does not fit classifier\.json"):
            load_classifier(artifact)
    finally:
        (artifact / "moved.json").rename(artifact / "quantization.json")


@pytest.mark.parametrize("labels", [["one"] * 4, ["a", "b", "c", "d"]], ids=["one class", "a class for each image"])
def test_images_without_classes_to_learn_are_refused(labels: list[str], tmp_path: Path) -> None:
    documents = [
        Document(
            id=str(number), text=label, kind="image", split="train", source="s", meta={"image": {"data": str(number)}}
        )
        for number, label in enumerate(labels)
    ]
    assert [class_of(document) for document in documents] == labels
    keep_all(tmp_path, documents)
    with pytest.raises(DataError, match="field label"):
        training_classes(tmp_path)


def test_logistic_regression_knows_every_class_of_images_that_are_sorted_by_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three classes of 20 images each, of which it may learn from 30."""
    dice = np.random.default_rng(0)
    with write_images(tmp_path) as images:
        for label in range(3):
            for _ in range(20):
                pixels = dice.integers(80 * label, 80 * label + 60, (4, 4, 3), dtype=np.uint8)
                images.add(encode(pixels, lossless=True))
    write_labels(tmp_path, [label for label in range(3) for _ in range(20)], ["a", "b", "c"])
    monkeypatch.setattr(vision, "MOST_TRAINING_IMAGES", 30)
    found = vision.logistic_regression(*[LabeledImages(ImageStore(tmp_path))] * 2)
    assert (found == np.repeat([0, 1, 2], 20)).mean() > 0.9


def test_the_confusion_counts_classes_by_row() -> None:
    found = confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]), 3)
    assert found == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert confusion(np.zeros(1, np.int64), np.zeros(1, np.int64), 1000) == []


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_layouts_that_cannot_work_are_refused_before_anything_is_read(layout: dict[str, int]) -> None:
    """The decoder of the run's configuration would fit the layout."""
    fitting = {
        "model": {"num_layers": 2, "num_kv_heads": 2, "max_seq_len": 8}, "pack": {"seq_len": 8},
        "vision": {"batch_tokens": 512},
    }  # fmt: skip
    config = load("vision", fitting).config
    with pytest.raises(ConfigError, match=rf"vision\.architecture: resnet needs .*parallel\.{next(iter(layout))} 2"):
        check_training(config, ParallelConfig(**layout), num_processes=2, stages=["vision"])


def test_the_recipe_is_valid_and_names_a_setting_that_cannot_work() -> None:
    assert [spec.name for spec in load("vision", {}).config.trainings] == ["vision"]
    with config_error("vision.gradient_accumulation_steps"):
        load("vision", {"vision": {"gradient_accumulation_steps": 2}})
    with config_error("vision.quantization", "choice"):
        load("vision", {"vision": {"quantization": "int2"}})
