"""The noise classifier: what it drops, what it leaves alone, and what its report says about both."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict

from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.report import CleanReport
from modelwright.data.clean.steps import noise as noise_classifier
from modelwright.data.clean.steps.noise import (
    TEST_CORRUPTIONS,
    TRAINING_CORRUPTIONS,
    Corruption,
    LinearClassifier,
    NoiseConfig,
    NoiseModel,
    heldout_report,
    layout_of,
    threshold_for,
)
from modelwright.data.document import Document
from modelwright.pipeline.cleaning import noise_warnings
from refusals import config_error

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
    kinds = list(TRAINING_CORRUPTIONS)
    result = [document(good(number), f"good-{number}") for number in range(num_good)]
    for number in range(num_bad):
        kind = kinds[number % len(kinds)]
        text = TRAINING_CORRUPTIONS[kind](good(10_000 + number), random.Random(number))
        result.append(document(text, f"{kind}-{number}"))
    random.Random(1).shuffle(result)
    return result


TRUSTED = [document(good(20_000 + number), f"t{number}") for number in range(600)]


def clean(folder: Path, documents: list[Document], *, num_trusted: int = 600, seed: int = 1, **settings) -> CleanReport:
    trusted = folder.with_name(f"{folder.name}-trusted.jsonl")
    trusted.write_text("\n".join(json.dumps({"text": entry.text}) for entry in TRUSTED[:num_trusted]))
    noise = NoiseConfig(**{"trusted": (str(trusted),), "min_precision": 0.8, **settings})
    steps = build_steps(CleanConfig(noise=noise), seed=seed)
    return clean_documents(iter(documents), steps, folder, SilentProgress(), shard_documents=100)[0]


def dropped_as_noise(folder: Path) -> list[str]:
    return [entry.document.id for entry in read_dropped(folder) if entry.step == "noise"]


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CleanReport]:
    folder = tmp_path_factory.mktemp("cleaned")
    chat = "\n".join(f"{name}: {good(number)[:40]}" for number, name in enumerate(["Ann", "Bob"] * 8))
    table = "\n".join(f"{number} | the {VERBS[number % 8]} horse | {number * 7} | a map" for number in range(30))
    spanish = "El comité se reunió el martes para discutir las nuevas reglas de la biblioteca, y casi todos opinaron. "
    spanish += (
        "La sala de lectura debería abrir hasta las nueve, aunque nadie sabe todavía quién pagará la calefacción."
    )
    foreign = [document(chat, "chat"), document(table, "table"), document(spanish, "spanish")]
    return folder, clean(folder, [*corpus(500, 150), *foreign])


@pytest.mark.slow
def test_junk_is_dropped_and_text_is_kept(cleaned: tuple[Path, CleanReport]) -> None:
    folder, report = cleaned
    dropped = dropped_as_noise(folder)
    false = [name for name in dropped if name.startswith("good")]
    by_quality = {entry.document.id for entry in read_dropped(folder)} - set(dropped)
    assert len(false) <= 0.05 * 500
    assert len(dropped) - len(false) >= 0.5 * (150 - sum(not name.startswith("good") for name in by_quality))
    assert report.noise["trusted_dropped"] <= 0.05
    assert report.noise["judged"] > report.noise["uncertain"]


@pytest.mark.slow
def test_the_report_is_about_generators_that_nobody_learned_from(cleaned: tuple[Path, CleanReport]) -> None:
    _, report = cleaned
    assert set(report.noise["recall_by_kind"]) == set(TEST_CORRUPTIONS)
    assert not set(TEST_CORRUPTIONS) & set(TRAINING_CORRUPTIONS)
    mean = sum(report.noise["recall_by_kind"].values()) / len(TEST_CORRUPTIONS)
    assert report.noise["recall"] == pytest.approx(mean, abs=1e-3)
    assert report.noise["recall_trained"] > 0.5


def test_the_step_keeps_everything_where_its_own_test_fails(tmp_path: Path) -> None:
    """The same corpus of which it drops junk: few trusted texts, or a high promise, show too little."""
    report = clean(tmp_path / "few", corpus(60, 40), num_trusted=220)
    assert report.noise["precision_low"] < 0.8
    assert (report.noise["acts"], report.noise["dropped"], report.noise["judged"]) == (False, 0, 0)
    assert not dropped_as_noise(tmp_path / "few")
    (warning,) = noise_warnings(report)
    assert "the step noise kept everything" in warning
    assert f"only {report.noise['precision_low']:.0%} is certain; 80% must be" in warning
    assert "--clean.noise.trusted []" in warning


def results_of(num_good: int, num_lost: int, num_junk: int, num_found: int) -> dict[str, Any]:
    """The report of a test with so many texts, of which so many would be dropped."""
    names = np.array([""] * num_good + [next(iter(TEST_CORRUPTIONS))] * num_junk)
    dropped = np.r_[np.arange(num_good) < num_lost, np.arange(num_junk) < num_found]
    return heldout_report(names, dropped, NoiseConfig())


def test_the_bound_is_that_of_exact_binomial_intervals() -> None:
    """Without a false drop the upper bound of their fraction is 1 - 0.025^(1 / n), and so it is for the recall."""
    found = results_of(1500, 0, 1500, 1500)
    high = 1 - 0.025 ** (1 / 1500)
    expected = 0.1 * (1 - high) / (0.1 * (1 - high) + 0.9 * high)
    assert (found["precision"], found["precision_low"]) == (1.0, pytest.approx(expected, abs=1e-4))
    assert found["acts"]


@pytest.mark.parametrize(
    ("results", "acts"),
    [
        ((1500, 1, 1500, 1350), True),
        ((1500, 9, 1500, 1350), False),  # a precision of 94%
        ((1500, 5, 1500, 1350), False),  # 97%, of which 93% are certain
        ((150, 0, 150, 150), False),  # nothing wrong in a test that is too small to show it
        ((1500, 0, 1500, 30), False),  # a filter that finds hardly any junk
        ((0, 0, 0, 0), False),
    ],
)
def test_it_acts_where_at_least_95_percent_are_certain(results: tuple[int, int, int, int], acts: bool) -> None:
    found = results_of(*results)
    assert found["acts"] == acts
    assert found["precision_low"] <= found["precision"]


def test_a_recall_near_zero_is_a_warning() -> None:
    report = CleanReport(noise={"recall_by_kind": {"repetition": 0.02, "mixed_lines": 0.7}})
    assert noise_warnings(report) == [
        "the noise classifier hardly finds junk such as repetition, from which it did not learn"
    ]
    assert not noise_warnings(CleanReport())


def test_forms_that_the_trusted_text_does_not_have_are_left_alone(cleaned: tuple[Path, CleanReport]) -> None:
    folder, report = cleaned
    assert {name for name, found in report.noise["forms"].items() if found["acts"]} == {
        "text, any language",
        "text, en",
    }
    assert not {"chat", "table", "spanish"} & set(dropped_as_noise(folder))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("Ann: hello\nBob: hello\nAnn: well?\nBob: fine, thanks", "chat"),
        ("[12:01] <ann> hello\n[12:02] <bob> hello\n[12:03] <ann> well?\n[12:04] <bob> fine", "chat"),
        ("a | b | c\n1 | 2 | 3\n4 | 5 | 6\n7 | 8 | 9", "table"),
        ("name,age,town\nAnn,3,Oslo\nBob,4,Rome\nEve,5,Bern", "table"),
        ("A first line, with a comma, and more.\nA second line.\nA third one, too.\nThe last one.", "text"),
        ("Note: this is one line.", "text"),
    ],
)
def test_layouts(text: str, layout: str) -> None:
    assert layout_of(text) == layout


@pytest.mark.slow
def test_the_seed_decides_the_samples_and_nothing_else_does(tmp_path: Path) -> None:
    documents = corpus(60, 20)
    reports = [
        clean(tmp_path / str(n), documents, num_trusted=250, seed=seed).noise for n, seed in enumerate((1, 1, 2))
    ]
    assert reports[0] == reports[1] != reports[2]


def test_too_few_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"noise\.trusted: 100 documents of 30 words or more are too few"):
        clean(tmp_path, corpus(100, 0), num_trusted=100)
    with config_error("model", match="model: needs trusted text"):
        NoiseConfig(model="folder")
    assert not NoiseConfig().trusted


@pytest.mark.parametrize("corruption", (TRAINING_CORRUPTIONS | TEST_CORRUPTIONS).values())
def test_every_corruption_changes_a_text_and_is_repeatable(corruption: Corruption) -> None:
    text = good(1)
    changed = corruption(text, random.Random(3))
    assert changed != text
    assert changed == corruption(text, random.Random(3))
    assert 0.3 * len(text) < len(changed) < 4 * len(text)
    assert isinstance(corruption("", random.Random(0)), str)


def test_what_is_saved_is_what_scikit_learn_has_fitted(tmp_path: Path) -> None:
    texts = [good(number) for number in range(100)]
    texts += [TRAINING_CORRUPTIONS["gibberish"](text, random.Random(0)) for text in texts]
    labels = np.arange(200) >= 100
    classifier, unseen = LinearClassifier.fit(texts, labels, np.arange(200) % 100)
    classifier.save(tmp_path / "model")
    assert unseen[labels].mean() > 0.9 > 0.1 > unseen[~labels].mean()
    p = LinearClassifier.load(tmp_path / "model").probabilities(texts)
    assert p[labels].min() > 0.9 > 0.1 > p[~labels].max()
    assert LinearClassifier.load(tmp_path / "model").probabilities([]).shape == (0,)


@pytest.mark.slow
def test_folds_side_by_side_give_the_bits_of_scikit_learns_own_cross_validation() -> None:
    rng = random.Random(3)
    texts = [f"{sentence(rng)} {sentence(rng)}" for _ in range(120)]
    texts += ["".join(rng.sample(text, len(text))) if rng.random() < 0.9 else text for text in texts[:60]]
    labels, groups = np.arange(len(texts)) >= 120, np.arange(len(texts)) % 120
    classifier, unseen = LinearClassifier.fit(texts, labels, groups)
    inputs = noise_classifier._ngrams(texts)
    folds = list(GroupKFold(5).split(inputs, labels, groups))
    linear = LogisticRegression(C=10.0, solver="liblinear", random_state=0)
    calibrated = CalibratedClassifierCV(linear, method="sigmoid", cv=folds, ensemble=False).fit(inputs, labels)  # type: ignore[arg-type]
    (whole,) = calibrated.calibrated_classifiers_
    slope, offset = -whole.calibrators[0].a_, -whole.calibrators[0].b_
    scores = cross_val_predict(linear, inputs, labels, cv=folds, method="decision_function")
    assert np.array_equal(classifier.weights, whole.estimator.coef_[0].astype(np.float32))
    assert (classifier.bias, classifier.slope, classifier.offset) == (whole.estimator.intercept_[0], slope, offset)
    assert np.array_equal(unseen, noise_classifier.logistic(slope * scores + offset))


def test_the_threshold_keeps_its_promise() -> None:
    rng = np.random.default_rng(1)
    p = rng.random(5000)
    labels = rng.random(5000) < p
    threshold = threshold_for(p, labels, 0.9, float(labels.mean()))
    assert labels[p >= threshold].mean() >= 0.89
    assert (p[labels] >= threshold).mean() > 0.2
    assert threshold_for(p, labels, 0.9, 0.1) > threshold, "with less noise fewer may be dropped wrongly"
    assert threshold_for(p, np.zeros(5000, bool), 0.9, 0.1) > 1
    few = threshold_for(np.array([0.9, 0.1]), np.array([True, False]), 0.9, 0.1)
    assert few > 1, "two samples promise nothing"


@pytest.mark.slow
def test_a_model_of_hugging_face_reads_the_uncertain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    read: list[int] = []
    scores = NoiseModel.scores

    def counted(self: NoiseModel, texts: Sequence[str]) -> np.ndarray:
        read.append(len(texts))
        return scores(self, texts)

    monkeypatch.setattr(NoiseModel, "scores", counted)
    junk = TRAINING_CORRUPTIONS["gibberish"](" ".join(map(good, range(3))), random.Random(0))
    mixed = [document(f"{good(number)} {junk[: 24 * (number % 40)]}", f"m{number}") for number in range(500, 540)]
    few = {"num_trusted": 220, "model": str(folder), "model_noise_label": "junk", "min_precision": 0.4}
    report = clean(tmp_path / "out", [*corpus(60, 20), *mixed], **few)
    assert 0 < report.noise["uncertain"] < 0.5 * report.noise["judged"], "it reads the uncertain ones alone"
    assert sum(read[2:]) == report.noise["uncertain"], "after calibration and test"
    assert not (tmp_path / "out" / "work").exists()
    with pytest.raises(DataError, match=r"noise\.model_noise_label: 'spam' is not one of clean, junk"):
        clean(tmp_path / "bad", corpus(1, 0), num_trusted=220, model=str(folder), model_noise_label="spam")
    with pytest.raises(DataError, match=r"noise\.model: .*nowhere: cannot be loaded"):
        clean(tmp_path / "none", corpus(1, 0), num_trusted=220, model=str(tmp_path / "nowhere"))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["noise"] == report.noise
