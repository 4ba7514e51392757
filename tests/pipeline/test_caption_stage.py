"""The stage caption from documents to a served model; killed and repeated, it ends with the same bits."""

import hashlib
import json
import signal
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from modelwright.core.config import ConfigError, ModelError
from modelwright.data.images.decode import StoredImage
from modelwright.data.images.store import open_images
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig
from modelwright.data.sources.corpora import digit_images
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.hf import load_model
from modelwright.model.vision.llava import PIXELS, image_prefix, inserted_images, load_llava
from modelwright.objectives.captioning import CaptionConfig, image_numbers
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.exports.hf import export_hf
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run import check_training
from modelwright.pipeline.stages.caption import (
    CAPTION_ROWS,
    class_words,
    image_token_id,
    read_image_prompts,
    tower_folder,
    tower_shape,
)
from modelwright.pipeline.stages.rows import PackJob
from modelwright.pipeline.stages.vision import accuracy_table
from modelwright.recipes.load import load
from rank_processes import Started, start_process
from refusals import config_error

pytestmark = pytest.mark.slow

SOURCE = '''
def add_{n}(first, second):
    """Add the number {n} to the sum of both arguments."""
    total = first + second
    return total + {n}
'''
NUM_DIGITS, NUM_PATCHES, QUESTION, TOKEN = 60, 4, "Which digit?", "<|image|>"


def settings(folder: Path) -> dict[str, Any]:
    """A run of a few seconds on 60 digits, three of which have conversations."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    records = []
    for number, document in enumerate(list(digit_images())[:NUM_DIGITS]):
        name = f"{document.id.partition(':')[2]}.png"
        (sources / name).write_bytes(StoredImage.from_plain(document.meta["image"]).data)
        record: dict[str, Any] = {"file_name": name, "label": document.meta["label"]}
        if number < 3:
            parts = [{"type": "image"}, {"type": "text", "text": f"Is it the number {number}?"}]
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": document.text}]
            more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
            record["messages"] = [*turns, *more]
        else:
            record["text"] = document.text
        records.append(record)
    (sources / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    for number in range(20):
        (sources / f"add_{number}.py").write_text(SOURCE.format(n=number * 17))
    return {
        "data": {"sources": [str(sources)], "validation_fraction": 0.2},
        "clean": {"quality": {"limits": {"image.max_hash_distance": 0}}, "duplicates": {"near": False}},
        "hardware": {"device": "cpu", "num_threads": 1},
        "tokenizer": {"vocab_size": 400, "special_tokens": [TOKEN]},
        "pack": {"seq_len": 96},
        "model": {
            "vocab_size": 400, "num_layers": 1, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
            "ffn_dim": 48, "max_seq_len": 96,
        },
        "stages": ["clean", "tokenize", "pack", "pretrain", "caption", "report"],
        "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
        "pretrain": {"num_steps": 2, "batch_tokens": 192},
        "caption": {
            "question": QUESTION, "num_steps": 8, "batch_tokens": 384, "checkpoint_every_steps": 2,
            "eval_every_steps": 4, "train_tower": True,
        },
        "vision_tower": {"image_size": 16, "patch_size": 8, "num_layers": 2, "model_dim": 16, "num_heads": 2,
                         "ffn_dim": 24},
    }  # fmt: skip


def start(config: Path, run: Path) -> Started:
    return start_process("modelwright.cli.entry", "run", config, "--run-dir", run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration, and the folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("captioned")
    config = folder / "small.yaml"
    config.write_text(json.dumps({"name": "small", **settings(folder)}))
    code, _, errors = start(config, folder / "run").end()
    assert code == 0, errors
    return config, folder / "run"


@pytest.mark.slow
def test_rows_are_conversations_with_their_images_and_only_answers_are_learned(finished: tuple[Path, Path]) -> None:
    _, run = finished
    rows = run / "pack" / "artifact" / "captions"
    tokenizer = Tokenizer.load(run / "tokenize" / "artifact")
    documents = {
        StoredImage.from_plain(one.meta["image"]).digest: (number, one)
        for number, one in enumerate(list(digit_images())[:NUM_DIGITS])
    }
    seen: set[int] = set()
    for split in ("train", "heldout"):
        store, packed = open_images(rows, split), PackedRows(rows / split)
        assert store is not None
        for batch in packed.batches(1):
            for piece, image in enumerate(image_numbers(batch)[0].tolist()):
                places = batch.segments_BT[0] == piece
                ids, labels = batch.input_ids_BT[0, places], batch.labels_BT[0, places]
                number, document = documents[StoredImage(store.data(image), 1, 1, 0).digest]
                seen.add(number)
                question = f"Is it the number {number}?" if number < 3 else QUESTION
                answers = [document.text, "Yes."] if number < 3 else [document.text]
                more = f"<|user|>Sure?<|end|><|assistant|>{answers[-1]}<|end|>" if number < 3 else ""
                rendered = f"<|bos|><|user|>{TOKEN * NUM_PATCHES}\n{question}<|end|><|assistant|>{document.text}<|end|>"
                assert tokenizer.decode(ids, skip_special=False) == rendered + more
                learned = tokenizer.decode(labels[labels != IGNORED], skip_special=False)
                assert learned == "".join(f"{answer}<|end|>" for answer in answers)
    assert seen == set(range(NUM_DIGITS))


def test_transformers_gives_the_logits_of_the_artifact(finished: tuple[Path, Path]) -> None:
    _, run = finished
    folder = run / "caption" / "artifact"
    model, theirs = load_llava(folder), transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    rows = run / "pack" / "artifact" / "captions"
    prompt = next(read_image_prompts(PackedRows(rows / "heldout")))
    store, prefix = open_images(rows, "heldout"), image_prefix(model)
    assert store is not None
    assert prefix is not None
    pixels = torch.from_numpy(store.pixels(prompt.image, size=16, fit="crop"))[None]
    ids = torch.tensor([[*prompt.prompt_ids, *prompt.answer_ids]])
    with torch.no_grad():
        insert = inserted_images(model, ids, {PIXELS: pixels[None]})
        ours = model.logits(model(ids, torch.arange(ids.shape[1])[None], causal_attend(), insert=insert))
        expected = theirs(input_ids=ids, pixel_values=prefix.tower.normalized(pixels)).logits
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(TOKEN) == theirs.config.image_token_id


def test_the_report_shows_captions_that_the_artifact_writes(finished: tuple[Path, Path]) -> None:
    _, run = finished
    facts = json.loads((run / "caption" / "artifact" / "manifest.json").read_text())["facts"]["captions"]
    rows = run / "pack" / "artifact" / "captions"
    prompts, store = list(read_image_prompts(PackedRows(rows / "heldout"))), open_images(rows, "heldout")
    assert store is not None
    assert facts["num_images"] == len(prompts)
    tokenizer = Tokenizer.load(run / "tokenize" / "artifact")
    params = SamplingParams(max_tokens=8, temperature=0.0, stop_ids=tokenizer.stop_ids)
    first = prompts[0]
    images = [[store.pixels(first.image, size=16, fit="crop")]]
    (found,) = generate(load_llava(run / "caption" / "artifact"), [first.prompt_ids], [params], images=images)
    example = facts["examples"][0]
    assert example["written"] == tokenizer.decode(found.token_ids).strip()
    assert example["reference"] == tokenizer.decode(first.answer_ids).strip()
    page = (run / "report.html").read_text()
    assert page.count(f'<img src="{example["image"]}"') == 1
    assert "captions are exact" in page


def test_the_run_is_served_and_exported_as_the_model_that_reads_images(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    """The card's own code runs, and gives the tokens of this project's engine for the same image."""
    _, run = finished
    found = find_model(run)
    assert (found.source.stage, find_model(run, stage="pretrain").source.stage) == ("caption", "pretrain")
    with pytest.raises(ModelError, match="reads images"):
        load_model(found.source.folder)
    target = export_hf(found, tmp_path / "small", overwrite=False)
    card = (target / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "A model that reads images, with a decoder of" in card
    rows = run / "pack" / "artifact" / "captions"
    prompt, store = next(read_image_prompts(PackedRows(rows / "heldout"))), open_images(rows, "heldout")
    assert store is not None
    square = store.pixels(prompt.image, size=16, fit="crop")
    Image.fromarray(square.transpose(1, 2, 0)).save(tmp_path / "image.png")
    code = card.partition("```python\n")[2].partition("```")[0]
    assert QUESTION in code
    code = code.replace('"small"', repr(str(target))).replace('"image.png"', repr(str(tmp_path / "image.png")))
    names: dict[str, Any] = {}
    exec(code, names)
    tokenizer = Tokenizer.load(target)
    params = SamplingParams(max_tokens=100, temperature=0.0, stop_ids=tokenizer.stop_ids)
    prompt_ids = names["inputs"]["input_ids"][0].tolist()
    (ours,) = generate(load_llava(target), [prompt_ids], [params], images=[[square]])
    theirs = names["answer"][0, len(prompt_ids) :].tolist()
    assert 0 < len(ours.token_ids) <= len(theirs), "they do not end at the context"
    assert theirs[: len(ours.token_ids)] == ours.token_ids


@pytest.mark.slow
def test_a_killed_stage_goes_on_with_the_same_bits(finished: tuple[Path, Path], tmp_path: Path) -> None:
    config, run = finished
    cut = tmp_path / "cut"
    process = start(config, cut)
    while process.is_alive and not any((cut / "caption" / "checkpoints").glob("*4*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL, "the run ended before it could be killed"
    code, _, errors = start(config, cut).end()
    assert code == 0, errors
    digests = [
        hashlib.sha256((one / "caption" / "artifact" / "model.safetensors").read_bytes()).hexdigest()
        for one in (run, cut)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"caption": {"batch_selection": {"signal": "loss"}}}, r"batch_selection.signal"),
        ({"caption": {"question": " "}}, r"question: is empty"),
        ({"tokenizer": {"special_tokens": ["<|bos|>"]}}, r"special_tokens: each must be a new text"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load("multimodal", overrides, str(tmp_path))


def test_a_frozen_tower_of_random_weights_is_refused() -> None:
    stages = [name for name in load("multimodal", {}).config.stage_names if name != "align"]
    config = load("multimodal", {"stages": stages, "caption": {"train_tower": False}}).config
    with config_error("caption.train_tower"):
        tower_shape(config)


def test_a_run_with_align_goes_on_with_its_tower_unless_caption_names_another_folder() -> None:
    shared = load("multimodal", {"vision_tower": {"init_from": "clip"}}).config
    assert tower_folder(shared) == ""
    other = load("multimodal", {"caption": {"vision_tower": {"init_from": "siglip"}}}).config
    assert tower_folder(other) == "siglip"
    alone = [name for name in shared.stage_names if name != "align"]
    assert tower_folder(load("multimodal", {"stages": alone, "vision_tower": {"init_from": "clip"}}).config) == "clip"
    assert tower_shape(load("multimodal", {}).config).patch_size == 8


def test_a_tokenizer_without_the_image_token_is_refused_by_name(finished: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.load(finished[1] / "tokenize" / "artifact")
    assert image_token_id(tokenizer, CaptionConfig()) == tokenizer.id_of(TOKEN)
    with config_error(
        "caption.image_token", match=r"caption\.image_token: the tokenizer lacks the special token '<image>'"
    ):
        image_token_id(tokenizer, CaptionConfig(image_token="<image>"))


def test_rows_whose_image_tokens_would_be_targets_are_refused(finished: tuple[Path, Path]) -> None:
    tokenizer, nothing = Tokenizer.load(finished[1] / "tokenize" / "artifact"), cast(Any, None)
    job = PackJob(
        context=nothing,
        config=load("multimodal", {}).config,
        settings=PackConfig(chat_loss="all"),
        tokenizer=tokenizer,
        clean=finished[1] / "clean" / "artifact",
    )
    with config_error("pack.chat_loss"):
        CAPTION_ROWS.pack(job, "train")


def test_the_report_says_what_each_method_learned_from() -> None:
    facts = {
        "num_images": 200, "num_training_images": 25_000, "accuracy": 0.9, "interval": [0.85, 0.93],
        "logistic_regression": 0.8, "most_frequent_class": 0.1, "num_better": 30, "num_worse": 10, "p_value": 0.002,
    }  # fmt: skip
    table = accuracy_table(facts, method="the captions", title="Class", remark="Words count.")
    assert [row[0] for row in table.rows] == [
        "the captions",
        "logistic regression on pixels",
        "the most frequent class",
    ]
    assert "labels of 10,000 of 25,000 training images" in table.caption
    assert "not trained on. Words count. 95%" in table.caption.replace("none of which was trained", "not trained")


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"context": 2}, {"tensor": 2}])
def test_layouts_that_divide_layers_or_rows_are_refused_before_anything_is_read(layout: dict[str, int]) -> None:
    config = load("multimodal", {"model": {"num_layers": 2}, "caption": {"batch_tokens": 1024}}).config
    with pytest.raises(ConfigError, match=rf"caption\.image_token: .* needs .*parallel\.{next(iter(layout))} 2"):
        check_training(config, ParallelConfig(**layout), num_processes=2, stages=["caption"])


def test_a_class_is_named_by_words_that_no_other_class_has() -> None:
    captions = ["A seven, thin.", "The digit 7, thin.", "7 it is", "A two, thin.", "Two it is", "seven"]
    words = class_words(captions, [7, 7, 7, 2, 2, 7])
    assert words.classes == {"seven": 7, "7": 7, "two": 2}
    assert [words.named(text) for text in ("a SEVEN!", "a two", "two or seven", "thin", "digit")] == [7, 2, -1, -1, -1]
    assert np.isscalar(words.named(""))
