"""The stage align from documents to its artifact; killed and repeated, it ends with the same bits."""

import hashlib
import json
import re
import shutil
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from modelwright.core.config import ConfigError, ModelError
from modelwright.data.images.decode import StoredImage
from modelwright.data.images.store import open_images
from modelwright.data.rows.loader import PackedRows
from modelwright.data.sources.corpora import digit_images
from modelwright.data.sources.stdlib_corpus import described_functions
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.objectives.contrastive import load_aligned
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.run import check_training
from modelwright.pipeline.stages.align import read_pairs, thumbnail
from modelwright.recipes.load import load
from rank_processes import Started, start_process

pytestmark = pytest.mark.slow

SOURCE = '''
def add_{n}(first, second):
    """Add the number {n} to the sum of both arguments.

    Nothing else.
    """
    total = first + second
    return total + {n}
'''


def settings(folder: Path) -> dict[str, Any]:
    """A run of a few seconds on 60 digits and 60 functions."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for document in list(digit_images())[:60]:
        stored = StoredImage.from_plain(document.meta["image"])
        name = document.id.partition(":")[2]
        (sources / f"{name}.png").write_bytes(stored.data)
        (sources / f"{name}.txt").write_text(document.text)
    for number in range(60):
        (sources / f"add_{number}.py").write_text(SOURCE.format(n=number * 17))
    return {
        "data": {"sources": [str(sources)], "validation_fraction": 0.2},
        "clean": {"quality": {"limits": {"image.max_hash_distance": 0}}, "duplicates": {"near": False}},
        "hardware": {"device": "cpu", "num_threads": 1},
        "tokenizer": {"vocab_size": 400},
        "pack": {"seq_len": 64},
        "model": {
            "vocab_size": 400, "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
            "ffn_dim": 48, "max_seq_len": 64,
        },
        "stages": ["clean", "tokenize", "pack", "align", "report"],
        "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
        "align": {
            "num_steps": 8, "batch_tokens": 1024, "checkpoint_every_steps": 2, "eval_every_steps": 4, "embed_dim": 16,
        },
        "vision_tower": {"image_size": 16, "patch_size": 8, "num_layers": 1, "model_dim": 16, "num_heads": 2,
                         "ffn_dim": 24},
    }  # fmt: skip


def written(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(json.dumps({"name": "small", **settings(folder)}))
    return path


def digests(run: Path) -> dict[str, str]:
    files = sorted((run / "align" / "artifact").rglob("*.safetensors"))
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(config: Path, run: Path) -> Started:
    return start_process("modelwright.cli.entry", "run", config, "--run-dir", run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration, and the folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("aligned")
    config = written(folder)
    code, _, errors = start(config, folder / "run").end()
    assert code == 0, errors
    return config, folder / "run"


@pytest.mark.slow
def test_rows_hold_every_pair_with_its_image(finished: tuple[Path, Path]) -> None:
    _, run = finished
    rows = run / "pack" / "artifact" / "aligned_pairs"
    tokenizer = Tokenizer.load(run / "tokenize" / "artifact")
    captions = {StoredImage.from_plain(one.meta["image"]).digest: one.text for one in list(digit_images())[:60]}
    num_images = 0
    texts: list[str] = []
    for split in ("train", "heldout"):
        store = open_images(rows, split)
        assert store is not None
        for pair in read_pairs(PackedRows(rows / split), tokenizer):
            if pair.image < 0:
                assert pair.text.startswith("Add the number")
                number = pair.text.split()[3]
                assert f"total + {number}" in tokenizer.decode(pair.code_ids)
                texts.append(pair.text)
                continue
            digest = StoredImage(store.data(pair.image), 1, 1, 0).digest
            assert captions[digest] == pair.text
            num_images += 1
    assert (num_images, len(texts), len(set(texts))) == (60, 60, 60)


def test_the_artifact_embeds_as_the_stage_did_and_reports_retrieval(finished: tuple[Path, Path]) -> None:
    _, run = finished
    facts = json.loads((run / "align" / "artifact" / "manifest.json").read_text())["facts"]["retrieval"]
    aligned = load_aligned(run / "align" / "artifact")
    rows = run / "pack" / "artifact" / "aligned_pairs"
    tokenizer = Tokenizer.load(run / "tokenize" / "artifact")
    pairs = [one for one in read_pairs(PackedRows(rows / "heldout"), tokenizer) if one.image < 0]
    scores = (
        aligned.embed_tokens("text", [one.text_ids for one in pairs])
        @ aligned.embed_tokens("code", [one.code_ids for one in pairs]).T
    )
    found = facts["recall"]["code: text to code"]
    assert found["num_candidates"] == len(pairs)
    right = [int((row >= row[place]).sum()) == 1 for place, row in enumerate(scores)]
    assert found["model"]["at_1"] == pytest.approx(np.mean(right))
    assert found["chance"]["at_1"] == pytest.approx(1 / len(pairs))
    store = open_images(rows, "heldout")
    assert store is not None
    vectors = aligned.embed_images([store.data(0), store.data(1)])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    page = (run / "report.html").read_text()
    assert "captions to images" in page
    assert "right one at place" in page
    for one in facts["examples"]["image: text to image"]:
        numbers = [int(re.match(r"\d\. image (\d+): ", line).group(1)) for line in one["found"]]
        assert one["found_images"] == [thumbnail(store.data(number)) for number in numbers]
        assert all(f'src="{image}"' in page for image in one["found_images"])
    for one in facts["examples"]["image: image to text"]:
        number = int(re.match(r"image (\d+): ", one["query"]).group(1))
        assert one["query_image"] == thumbnail(store.data(number))


@pytest.mark.slow
def test_a_killed_stage_goes_on_with_the_same_bits(finished: tuple[Path, Path], tmp_path: Path) -> None:
    config, run = finished
    cut = tmp_path / "cut"
    process = start(config, cut)
    while process.is_alive and not any((cut / "align" / "checkpoints").glob("*4*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (cut / "align" / "artifact" / "manifest.json").exists()
    code, _, errors = start(config, cut).end()
    assert code == 0, errors
    assert digests(cut) == digests(run)
    assert len(digests(cut)) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"align": {"gradient_accumulation_steps": 2}}, r"gradient_accumulation_steps: 2 microbatches would not"),
        ({"align": {"batch_selection": {"signal": "loss"}}}, r"batch_selection.signal"),
        ({"vision_tower": {"patch_size": 5}}, r"patch_size: 5 must divide"),
        ({"align": {"temperature": 0}}, r"temperature: must be in"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load("multimodal", overrides, str(tmp_path))


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"context": 2}])
def test_layouts_that_divide_a_batch_or_a_row_are_refused_before_anything_is_read(layout: dict[str, int]) -> None:
    config = load("multimodal", {"model": {"num_layers": 2}, "align": {"batch_tokens": 1024}}).config
    with pytest.raises(ConfigError, match=rf"align\.loss: clip needs .*parallel\.{next(iter(layout))} 2"):
        check_training(config, ParallelConfig(**layout), num_processes=2, stages=["align"])


def test_a_folder_that_lacks_a_projection_is_refused(finished: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "aligned"
    shutil.copytree(finished[1] / "align" / "artifact", folder)
    path = folder / "alignment.safetensors"
    tensors = load_file(path)
    del tensors["text.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"does not fit alignment\.json"):
        load_aligned(folder)
    (folder / "alignment.json").write_text("{}")
    with pytest.raises(ModelError, match="embed_dim or pooling"):
        load_aligned(folder)


@pytest.mark.parametrize("between", ["\x0c\n", "\x1c", "\r\n"], ids=["form feed", "separator", "CRLF"])
def test_the_code_of_a_function_begins_where_the_parser_says(between: str) -> None:
    source = f"first = 1  # {between}\n" + SOURCE.format(n=3).replace("\n", "\r\n" if between == "\r\n" else "\n")
    (pair,) = described_functions(source)
    assert pair.code.splitlines() == ["def add_3(first, second):", "    total = first + second", "    return total + 3"]


def test_functions_lose_their_docstring_and_keep_the_rest() -> None:
    (pair,) = described_functions("class A:\n" + textwrap.indent(SOURCE.format(n=3), "    "))
    assert pair.text == "Add the number 3 to the sum of both arguments."
    assert '"""' not in pair.code
    assert pair.code.splitlines()[0].startswith("def add_3")
    assert not list(described_functions('def f(:\n    """broken"""'))
