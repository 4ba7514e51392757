"""The claims on data: their comparisons are fair on a small text, and their rules hold."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.data.clean.config import CleanConfig
from modelwright.data.document import Document
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.parallel.mesh import single
from modelwright_claims import adaptive_augmentation, cleaning_scores, data_utilization, dynamic_batching, workbench
from modelwright_claims.adaptive_augmentation import ADAPTIVE, AUGMENTATIONS, NONE
from modelwright_claims.claim import Claim, Measurement, Setting
from modelwright_claims.cleaning_scores import Result, Score
from modelwright_claims.data_utilization import CLEANED, RAW, UNSPOILED
from modelwright_claims.dynamic_batching import DYNAMIC, PACKED, PADDED, equal_updates, padding_share, slots_of
from modelwright_claims.judging import judge
from modelwright_claims.training_run import Outcome, Run, train_once
from modelwright_claims.workbench import store_text

WORDS = ("river", "letter", "teacher", "garden", "music", "winter", "bread", "window", "stone", "paper", "road", "and")
SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=4, num_steps=5)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Short texts, most of them much shorter than a row."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    texts = [". ".join(" ".join(rng.choices(WORDS, k=5)) for _ in range(rng.choice((1, 1, 2, 6)))) for _ in range(300)]
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=300))
    store_text(folder, {"train": texts[:260], "validation": texts[260:280], "test": texts[280:]}, tokenizer)
    return Setting(quick=True, folder=folder, progress=SilentProgress())


def kind(claim: Claim, samples: Mapping[str, Sequence[float]], **conditions: float) -> str:
    """The kind of the verdict; one that is met has all figures that the overview shows."""
    verdict = judge(claim, Measurement(samples=samples, conditions=conditions))
    assert verdict.kind != "met" or set(claim.headline) <= set(verdict.figures)
    return verdict.kind


def test_updates_of_all_batches_have_equally_many_real_tokens(setting: Setting) -> None:
    sizes = equal_updates(setting, replace(SIZE, batch_rows=16))
    real = {
        arm: slots_of(setting, sizes[arm], mode, 20) * (1 - padding_share(setting, sizes[arm], mode, 20))
        for arm, mode in dynamic_batching.MODES.items()
    }
    assert max(real.values()) / min(real.values()) < 1.1
    assert sizes[PADDED].batch_rows > 16 > sizes[PACKED].batch_rows - 3
    padding = {arm: padding_share(setting, sizes[arm], mode, 20) for arm, mode in dynamic_batching.MODES.items()}
    assert padding[PACKED] < padding[DYNAMIC] < padding[PADDED]


def trained(setting: Setting, run: Run) -> Outcome:
    return train_once(setting, run, single(workbench.device()))


def test_a_strength_of_none_trains_on_the_plain_rows(setting: Setting) -> None:
    plain, none, changed = (
        trained(setting, Run(size=SIZE, augmentation=one))
        for one in (None, AUGMENTATIONS[NONE], replace(AUGMENTATIONS[ADAPTIVE], probability=1.0))
    )
    assert none.steps["loss"] == plain.steps["loss"]
    assert none.heldout_loss == plain.heldout_loss
    assert changed.steps["loss"] != plain.steps["loss"]
    assert changed.steps["augmentation_strength"] == [1.0] * 5
    assert none.steps["augmentation_strength"] == [0.0] * 5


def test_verdict_on_batches() -> None:
    met = {
        **{f"padding, {arm}": [5.0] for arm in dynamic_batching.ARMS},
        **{f"held-out loss, {arm}": [3.0, 3.1] for arm in dynamic_batching.ARMS},
        f"{dynamic_batching.PACE}{DYNAMIC}": [200.0, 201.0],
        f"{dynamic_batching.PACE}{PADDED}": [100.0, 101.0],
        f"{dynamic_batching.PACE}{PACKED}": [190.0, 191.0],
    }
    claim = dynamic_batching.CLAIM
    assert kind(claim, met) == "met"
    assert kind(claim, met | {f"{dynamic_batching.PACE}{PACKED}": [210.0, 211.0]}) == "short"
    assert kind(claim, met | {f"padding, {DYNAMIC}": [21.0]}) == "short"
    assert kind(claim, met | {f"held-out loss, {DYNAMIC}": [3.1, 3.2]}) == "short"


def test_verdict_on_augmentation() -> None:
    losses = {f"final loss, {arm}": [3.0, 3.2, 2.9] for arm in adaptive_augmentation.ARMS}
    own = f"final loss, {ADAPTIVE}"
    claim = adaptive_augmentation.CLAIM
    assert kind(claim, losses | {own: [2.9, 3.11, 2.8]}) == "met"
    assert kind(claim, losses) == "short"
    assert kind(claim, losses | {own: [2.9, 3.11, 2.8], f"final loss, {NONE}": [2.8, 3.0, 2.7]}) == "short"
    assert kind(claim, {own: [2.9, 3.1, 2.8]}) == "not judged"


def test_verdict_on_cleaning() -> None:
    result = Result(scores={"duplicates": Score(found=9, missed=1)}, documents=100, before=62, kept=70, after=65)
    fast, slow = (Outcome(heldout_loss=3.0, seconds=1.0, curve=[(0, 4.0), (last, 3.0)]) for last in (60, 100))
    size = data_utilization.study_size(Setting(quick=False, folder=Path(), progress=SilentProgress()))
    tried = {arm: {1e-3: 3.0, 2e-3: 2.9, 4e-3: 3.0} for arm in data_utilization.ARMS}

    def found(raw: Outcome, cleaned: Outcome, results: Sequence[Result] = (result, result)) -> Measurement:
        outcomes = {RAW: [raw, raw], CLEANED: [cleaned, cleaned], UNSPOILED: [cleaned, cleaned]}
        by_default = [replace(result, kept=80, after=60)] * 2
        return data_utilization.measurement(size, results, by_default, tried, outcomes, 3.0)

    claim = data_utilization.CLAIM
    verdict = judge(claim, found(slow, fast))
    assert verdict.kind == "met"
    assert set(claim.headline) <= set(verdict.figures)
    assert verdict.figures["recall, duplicates"].value == 90
    assert verdict.figures["usable after, default settings"].value == 75
    assert verdict.figures["documents kept, default settings"].value == 80
    assert "75.0% usable after default settings" in verdict.reason
    assert verdict.figures["fewer steps"].value == pytest.approx(100 / 60)
    assert judge(claim, found(slow, slow)).kind == "short"
    assert judge(claim, found(slow, fast, [replace(result, after=60)] * 2)).kind == "short"
    assert judge(claim, found(slow, fast, [replace(result, before=50)] * 2)).kind == "short"
    whole = found(slow, fast)
    older = {name: values for name, values in whole.samples.items() if not name.endswith(data_utilization.BY_DEFAULT)}
    assert judge(claim, replace(whole, samples=older)).kind == "met", "no target speaks of the default settings"


def test_default_cleaning_is_compared_on_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, CleanConfig]] = []

    def keep_all(entries: Any, config: CleanConfig) -> tuple[dict[str, str], dict[str, str]]:
        seen.append((entries, config))
        return {document.id: document.text for document, _ in entries}, {}

    monkeypatch.setattr(data_utilization, "clean_entries", keep_all)
    monkeypatch.setattr(cleaning_scores, "clean_entries", keep_all)
    texts = [" ".join(random.Random(number).choices(WORDS, k=90)) for number in range(40)]
    corpus = data_utilization.Texts(corpus=texts[:30], trusted=texts[30:], validation=(), test=())
    setting = Setting(quick=True, folder=tmp_path, progress=SilentProgress())
    cleaned = data_utilization.spoil_and_clean(setting, corpus, 1)
    (entries, with_noise), (same, default) = seen
    assert same == entries
    assert with_noise.noise.trusted
    assert default == CleanConfig()
    assert cleaned.by_default.before == cleaned.result.before < cleaned.by_default.documents


def test_texts_of_the_corpus_are_neither_trusted_nor_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def corpus(**options: Any) -> Iterator[Document]:
        for number in range(1200):
            text = " ".join(WORDS * 8) + f" {number % 1000}"
            split = "heldout" if number % 10 == 0 else "train"
            yield Document(id=str(number), text=text, kind="prose", split=split, source="text")

    monkeypatch.setattr(workbench, "machine_corpus", corpus)
    texts = data_utilization.read_texts(most=200, fraction=1.0)
    parts = [set(part) for part in (texts.corpus, texts.trusted, texts.validation, texts.test)]
    assert list(map(len, parts)) == [200, 600, 50, 50]
    assert len(set().union(*parts)) == sum(map(len, parts))
