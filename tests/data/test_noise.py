"""The noise classifier: its parts by their definition, and the cascade on text with known junk in it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from modelwright.core.errors import ConfigError, DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import CleanReport, clean_documents, read_dropped
from modelwright.data.clean_config import CleanConfig
from modelwright.data.corruptions import CORRUPTIONS
from modelwright.data.document import Document
from modelwright.data.steps.noise import (
    NoiseConfig,
    calibrate,
    fit_logistic,
    precision_recall,
    threshold_for,
    uncertain_band,
)

SUBJECTS = ("the council", "a farmer", "our teacher", "the old ship", "my neighbor", "the museum", "a young doctor")
VERBS = ("bought", "repaired", "painted", "forgot", "described", "carried home", "was looking for", "gave away")
OBJECTS = (
    "a wooden table",
    "three letters",
    "the broken clock",
    "some fresh bread",
    "a map of the river",
    "two horses",
)
ENDS = ("on a rainy morning", "because nobody else would", "before the shop closed", "without saying a word", "again")


def sentence(rng: random.Random) -> str:
    words = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(ENDS)}"
    return words[0].upper() + words[1:] + "."


def good(number: int) -> str:
    rng = random.Random(number)
    return " ".join(sentence(rng) for _ in range(rng.randrange(5, 15))) + f" That was number {number}."


def document(text: str, name: str) -> Document:
    return Document(id=name, text=text, kind="prose", split="train", source="test")


def corpus(num_good: int, num_bad: int) -> list[Document]:
    kinds = list(CORRUPTIONS)
    result = [document(good(number), f"good-{number}") for number in range(num_good)]
    for number in range(num_bad):
        kind = kinds[number % len(kinds)]
        text = CORRUPTIONS[kind](good(10_000 + number), random.Random(number))
        result.append(document(text, f"{kind}-{number}"))
    random.Random(1).shuffle(result)
    return result


def clean(folder: Path, documents: list[Document], **settings) -> tuple[CleanReport, list[str]]:
    noise = NoiseConfig(**{"enabled": True, "min_train_steps": 100, "min_precision": 0.8, **settings})
    config = CleanConfig(noise=noise, shard_documents=100, num_workers=1)
    trusted = [document(good(20_000 + number), f"t{number}") for number in range(600)]
    report, _ = clean_documents(
        iter(documents), config, folder, SilentProgress(), read_trusted=lambda sources, most: trusted[:most]
    )
    return report, [entry.document.id for entry in read_dropped(folder) if entry.step == "noise"]


def test_junk_is_dropped_and_text_is_kept(tmp_path: Path) -> None:
    report, dropped = clean(tmp_path, corpus(500, 150), trusted=("given",))
    false = [name for name in dropped if name.startswith("good")]
    by_quality = {entry.document.id for entry in read_dropped(tmp_path)} - set(dropped)
    assert len(false) <= 0.05 * 500
    assert len(dropped) - len(false) >= 0.5 * (150 - sum(not name.startswith("good") for name in by_quality))
    assert report.noise["precision"] >= 0.9
    assert 0.6 <= report.noise["recall"] <= 1
    assert set(report.noise["recall_by_kind"]) == set(CORRUPTIONS)
    assert report.noise["judged"] >= report.noise["read_by_encoder"] > 0
    details = [entry.detail for entry in read_dropped(tmp_path) if entry.step == "noise"]
    assert any("by encoder" in detail for detail in details)


def test_the_corpus_itself_gives_the_trusted_samples(tmp_path: Path) -> None:
    documents = corpus(500, 60)
    _, first = clean(tmp_path, documents)
    bad = [name for name in first if not name.startswith("good")]
    assert len(bad) >= 20
    assert len(first) - len(bad) <= 0.1 * 500


def test_too_few_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"noise\.trusted: \d+ documents of 30 words or more are too few"):
        clean(tmp_path, corpus(100, 0))
    with pytest.raises(ConfigError, match="min_precision"):
        NoiseConfig(min_precision=1.5)


def test_every_corruption_changes_a_text_and_is_repeatable() -> None:
    text = good(1)
    for corruption in CORRUPTIONS.values():
        changed = corruption(text, random.Random(3))
        assert changed != text
        assert changed == corruption(text, random.Random(3))
        assert 0.3 * len(text) < len(changed) < 4 * len(text)
        assert isinstance(corruption("", random.Random(0)), str)


def test_logistic_regression_and_calibration() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(4000, 3)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(2 * features[:, 0] - features[:, 1] + 0.5)))
    labels = rng.random(4000) < chance
    p = fit_logistic(features, labels).probabilities(features)
    assert np.abs(p - chance).mean() < 0.02
    slope, offset = calibrate(4 * features[:, 0].astype(np.float64), labels)
    p = 1 / (1 + np.exp(-(slope * 4 * features[:, 0] + offset)))
    for low in np.arange(0.1, 0.9, 0.2):
        inside = (p >= low) & (p < low + 0.2)
        assert labels[inside].mean() == pytest.approx(p[inside].mean(), abs=0.06)


def test_band_and_threshold_keep_their_promises() -> None:
    rng = np.random.default_rng(1)
    p = rng.random(5000)
    labels = rng.random(5000) < p
    low, high = uncertain_band(p, labels, 0.01, 0.002)
    assert 0 < low < high < 1
    assert labels[p < low].sum() <= 0.01 * 5000
    assert (~labels[p > high]).sum() <= 0.002 * 5000
    threshold = threshold_for(p, labels, 0.9, float(labels.mean()))
    precision, recall = precision_recall(p >= threshold, labels)
    assert precision >= 0.9
    assert threshold_for(p, labels, 0.9, 0.1) > threshold, "with less noise fewer may be dropped wrongly"
    assert recall > 0.2
    assert threshold_for(p, np.zeros(5000, bool), 0.9, 0.1) == 1
    assert precision_recall(np.zeros(3, bool), np.ones(3, bool)) == (1.0, 0.0)


def test_a_model_of_hugging_face_decides(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for number in range(50) for word in good(number).split()})
    vocab = {"[UNK]": 0, "[PAD]": 1, **{word: i + 2 for i, word in enumerate(words)}}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]")
    config = transformers.BertConfig(
        vocab_size=len(vocab), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label={0: "clean", 1: "junk"}, label2id={"clean": 0, "junk": 1},
    )  # fmt: skip
    folder = tmp_path / "model"
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report, _ = clean(tmp_path / "out", corpus(300, 30), model=str(folder), model_noise_label="junk", trusted=("x",))
    assert report.noise["read_by_encoder"] > 0
    assert not (tmp_path / "out" / "work").exists()
    with pytest.raises(DataError, match=r"noise\.model_noise_label: 'spam' is not one of clean, junk"):
        clean(tmp_path / "bad", corpus(300, 0), model=str(folder), model_noise_label="spam", trusted=("x",))
    with pytest.raises(DataError, match=r"noise\.model: .*nowhere: cannot be loaded"):
        clean(tmp_path / "none", corpus(300, 0), model=str(tmp_path / "nowhere"), trusted=("x",))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["noise"] == report.noise
