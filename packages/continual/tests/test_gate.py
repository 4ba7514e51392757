"""The gate: four poisons are refused or filtered, a clean update passes; bounds, levels and counted uses."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm, t

from continual_update import QUICK, Record, flipped, garbage, new_records, old_records, write_records
from continual_world import World
from modelwright.core.artifacts import ArtifactError, RunDir, read_manifest, write_artifact, write_atomic
from modelwright.core.config import ConfigError, DataError, read_overrides, split_words
from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document
from modelwright.pipeline.run_config import run_schema
from modelwright_continual import update_data
from modelwright_continual.benchmark import freeze_benchmark, load_benchmark
from modelwright_continual.gate.judge import VERDICT, GateConfig, Verdict, drawn_texts, judge
from modelwright_continual.gate.measures import PairedComparison
from modelwright_continual.gate.poison import check_garbage, check_heldout, check_influence, check_labels, check_share
from modelwright_continual.heldout import HeldoutTexts
from modelwright_continual.served import served_folder
from modelwright_continual.update import UpdateRequest, run_update

pytestmark = pytest.mark.slow

SILENT = SilentProgress()
NEW = new_records(range(1000, 1150))
COMPARISON = PairedComparison(level=0.025, margin=0.02, resamples=2000, seed=0)


def updated(world: World, tmp_path: Path, *parts: Sequence[Record], old: str = "") -> tuple[RunDir, Verdict]:
    run = RunDir(tmp_path / "run")
    request = UpdateRequest(
        model=world.base,
        new=(str(write_records(tmp_path / "new.jsonl", *parts)),),
        old=(old,) if old else (),
        replay=0.25,
        settings=read_overrides(run_schema(), split_words(QUICK)[1]),
    )
    run_update(request, world.benchmark, run, words=["test"], progress=SILENT)
    return run, judge(run, served_folder(world.base), world.benchmark, GateConfig(max_uses=50), SILENT)


def failed_checks(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.passed]


def document(record: Record, source: str = "new") -> Document:
    text = f"{record['question']}\n\n{record['answer']}"
    return Document(id=record["question"], text=text, kind="qa", split="train", source=source, meta=record)


@pytest.mark.slow
def test_a_clean_update_passes(world: World, released: Path, tmp_path: Path) -> None:
    """Judged on the quantized model; the verdict is kept, and reading it is no further use of the test half."""
    run, verdict = RunDir(released), Verdict.read(released / "gate")
    assert verdict.passed, verdict.table()
    assert verdict.reasons == []
    rules = {(measure.task, measure.rule) for measure in verdict.measures}
    assert rules == {("old", "not worse"), ("new", "better")}
    assert all(measure.num_records in (40, 50) for measure in verdict.measures)
    uses = world.benchmark.uses
    pairs = [(use.candidate, use.champion) for use in uses]
    assert pairs.count((verdict.candidate, verdict.champion)) == 1
    again = judge(run, served_folder(world.base), world.benchmark, GateConfig(max_uses=50), SILENT)
    assert again.as_json() == verdict.as_json()
    with write_artifact(run.path / "gate", kind="gate", digest=""):  # as if the process had died before
        pass
    repeated = judge(run, served_folder(world.base), world.benchmark, GateConfig(max_uses=50), SILENT)
    assert repeated.as_json() == verdict.as_json()
    assert world.benchmark.uses == uses
    # A copy of the benchmark, used up by others: the same texts and models pass the same checks on every processor.
    shutil.copytree(world.benchmark.folder, tmp_path / "bench")
    used_up = load_benchmark(tmp_path / "bench")
    used_up.count_use("another candidate", verdict.champion, 1)
    saved = run.path / "gate"
    saved.rename(run.path / "kept")
    with pytest.raises(ConfigError, match="freeze a new benchmark"):
        judge(run, served_folder(world.base), used_up, GateConfig(max_uses=1), SILENT)
    (run.path / "kept").rename(saved)


@pytest.mark.slow
def test_garbage_is_refused(world: World, tmp_path: Path) -> None:
    """A fifth of the texts: too little to be seen in the benchmark's figures. No use of the test half is spent."""
    before = world.benchmark.uses
    _, verdict = updated(world, tmp_path, NEW, garbage(40))
    assert not verdict.passed
    assert failed_checks(verdict) == ["order of new texts"]
    assert world.benchmark.uses == before
    assert verdict.use == 0


def salad(records: Sequence[Record], count: int, seed: int) -> list[Record]:
    """Words at random from those of the records, as many as a record has."""
    dice = random.Random(seed)
    words = [word for one in records for word in f"{one['question']} {one['answer']}".split()]
    return [
        {"question": " ".join(dice.choices(words, k=4)), "answer": " ".join(dice.choices(words, k=2))}
        for _ in range(count)
    ]


def spam(count: int) -> list[Record]:
    """An advertisement with other names and numbers."""
    dice, names = random.Random(0), ("Anna", "Bruno", "Chloe", "David", "Elena", "Felix", "Greta", "Hugo")
    return [
        {
            "question": f"Where did {dice.choice(names)} get the best card for {dice.randint(1, 10**6)} dollars?",
            "answer": f"At the bank of {dice.choice(names)}: call {dice.randint(10**6, 10**7)} and ask for the card.",
        }
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(64, 0), (38, 2)])
def test_word_salad_is_refused(world: World, tmp_path: Path, count: int, seed: int) -> None:
    """The words of the honest texts, which cost the model no more than those; three in ten texts, then a fifth."""
    _, verdict = updated(world, tmp_path, NEW, salad(NEW, count, seed))
    assert "order of new texts" in failed_checks(verdict), verdict.table()
    assert verdict.use == 0


@pytest.mark.slow
def test_a_template_is_capped_and_refused_if_it_is_learned_all_the_same(world: World, tmp_path: Path) -> None:
    """Twenty copies of 650 are learned from; the others became less predictable than the task did, so they pass."""
    run, verdict = updated(world, tmp_path, NEW, spam(650))
    assert read_manifest(run.path / "data").facts["capped"]["template"]["capped"] == 630
    found = {check.name: check for check in verdict.checks}["templates of new texts"]
    assert "copies that it has not read" in found.text
    assert found.passed, verdict.table()
    frequent = check_share("templates", "texts", [True] * 650 + [False] * 150, [False] * 50)
    assert not check_influence(frequent, [2.0] * 50, [1.0] * 50).passed
    assert check_influence(frequent, [1.0] * 50, [2.0] * 50).passed


@pytest.mark.slow
def test_flipped_labels_are_refused(world: World, tmp_path: Path) -> None:
    _, verdict = updated(world, tmp_path, NEW[:75], flipped(NEW[75:]))
    assert not verdict.passed
    assert failed_checks(verdict) == ["labels of new texts"]


def test_what_is_replayed_is_checked_as_well(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old texts with garbage, and with held-out questions that came past the filter."""
    monkeypatch.setattr(update_data, "_screened", lambda documents, heldout, dropped: iter(documents))
    leaks = [
        {"question": one.messages[0]["content"], "answer": one.messages[1]["content"]}
        for one in world.benchmark.read("old", "test")
    ]
    before = world.benchmark.uses
    old = str(write_records(tmp_path / "old.jsonl", leaks, garbage(100)))
    _, verdict = updated(world, tmp_path, NEW, old=old)
    assert failed_checks(verdict) == ["held-out texts", "order of old texts"]
    assert world.benchmark.uses == before


def test_held_out_questions_and_leaks_are_filtered_and_what_was_not_is_refused(world: World, tmp_path: Path) -> None:
    """The update filters them and passes; texts that came past the filter are found in what was trained on."""
    heldout = [
        {"question": one.messages[0]["content"], "answer": one.messages[1]["content"]}
        for one in world.benchmark.read("new", "test")
    ]
    wrong = [{**one, "answer": "Kind: nothing"} for one in heldout]
    run, verdict = updated(world, tmp_path, NEW, heldout[:20], wrong[20:])
    assert read_manifest(run.path / "data").facts["dropped"] == {"held-out question": len(heldout)}
    assert verdict.passed, verdict.table()
    texts = HeldoutTexts.of(world.benchmark.every_document())
    assert check_heldout([document(one) for one in NEW], texts).passed
    for poison in (heldout, wrong):
        check = check_heldout([document(one) for one in [*NEW, *poison[:1]]], texts)
        assert not check.passed
        assert poison[0]["question"] in check.text


def test_an_update_that_forgets_is_refused(world: World, tmp_path: Path) -> None:
    """It learns the new task alone, at a high rate, and no average may save it."""
    settings = read_overrides(run_schema(), split_words([*QUICK, "--sft.learning_rate=2e-2"])[1])
    new = str(write_records(tmp_path / "new.jsonl", NEW))
    request = UpdateRequest(model=world.base, new=(new,), replay=0.0, average=False, settings=settings)
    run = RunDir(tmp_path / "run")
    run_update(request, world.benchmark, run, words=["test"], progress=SILENT)
    verdict = judge(run, served_folder(world.base), world.benchmark, GateConfig(max_uses=50), SILENT)
    assert [measure.task for measure in verdict.measures if not measure.passed] == ["old"], verdict.table()
    assert "REFUSED" in verdict.reasons[0]


def test_checks_pass_texts_like_the_trusted_ones() -> None:
    """At most `ERROR` of corpora without a fault are refused, and a few odd texts in a small one are no garbage."""
    draw, refused = np.random.default_rng(0), 0
    for _ in range(400):
        new, trusted = draw.gamma(3.0, size=300), draw.gamma(3.0, size=60)
        odd = [draw.random(count) < 0.2 for count in (300, 60)]
        share = check_share("order", "texts", odd[0].tolist(), odd[1].tolist(), least_gap=0.0)
        refused += not (check_garbage(new, trusted).passed and share.passed)
    assert refused <= 9  # the 99% quantile of a binomial distribution at `ERROR`
    trusted, clean = draw.gamma(3.0, size=60), draw.gamma(3.0, size=80)
    for odd in (np.full(20, 30.0), np.zeros(20)):
        assert not check_garbage(np.concatenate([clean, odd]), trusted).passed
    assert check_garbage([30.0], trusted).passed
    assert not check_share("order", "texts", [True] * 30 + [False] * 70, [False] * 50).passed
    assert check_share("order", "texts", [True] * 9 + [False] * 91, [False] * 1000).passed  # another subject


def test_label_check_needs_labels_that_questions_tell() -> None:
    trusted = [document(one) for one in new_records(range(90))]
    new = new_records(range(200, 290))
    assert check_labels([document(one) for one in new], trusted).passed
    assert not check_labels([document(one) for one in [*new[:60], *flipped(new[60:])]], trusted).passed
    told = check_labels([document(one) for one in flipped(new)], [document(one) for one in old_records(range(90))])
    assert told.passed
    assert "not checked" in told.text


def test_bounds_cover_the_true_difference_as_often_as_they_say() -> None:
    """And the relative difference is that of the sums."""
    draw, missed = np.random.default_rng(1), 0
    for number in range(200):
        before = draw.gamma(5.0, size=150)
        after = before * 1.05 + draw.normal(0.0, 1.0, size=150)
        rows = [[{"id": i, "nats": v, "num_bytes": 4} for i, v in enumerate(values)] for values in (before, after)]
        measure = replace(COMPARISON, seed=number, resamples=400, level=0.05).costs("old", "bits", "not worse", *rows)
        assert measure.difference == pytest.approx(after.sum() / before.sum() - 1.0)
        missed += not measure.low <= 0.05 <= measure.high
    assert 8 <= missed <= 36  # 20 are expected


def test_accuracy_counts_as_worse_when_it_falls() -> None:
    rows = [[{"id": i, "correct": i < right} for i in range(100)] for right in (80, 60)]
    measure = COMPARISON.accuracy("new", "multiple choice", "not clearly worse", *rows)
    assert measure.difference == pytest.approx(0.2)
    assert not measure.passed
    assert COMPARISON.accuracy("new", "multiple choice", "not clearly worse", *reversed(rows)).passed
    with pytest.raises(ValueError, match="different records"):
        COMPARISON.accuracy("new", "multiple choice", "not clearly worse", rows[0], rows[1][1:])


def correct_rows(right: Sequence[bool]) -> list[dict[str, object]]:
    return [{"id": number, "correct": bool(value)} for number, value in enumerate(right)]


def test_answers_that_stay_the_same_show_only_as_much_as_their_number_allows() -> None:
    """The interval has a width where no answer has changed; that of as many as it takes lies within the margin."""
    for count, passed in ((20, False), (180, False), (200, True)):
        rows = correct_rows([True] * count)
        measure = COMPARISON.accuracy("old", "multiple choice", "not worse", rows, rows)
        assert measure.high == pytest.approx(1.96**2 / (count + 1.96**2), rel=1e-3)
        assert measure.low == pytest.approx(-measure.high)
        assert measure.passed == passed
    all_lost = COMPARISON.accuracy("old", "x", "not worse", correct_rows([True] * 30), correct_rows([False] * 30))
    assert all_lost.high == 1.0
    assert not all_lost.passed


def test_accuracies_within_the_margin_are_wrongly_found_as_often_as_the_level_says() -> None:
    """Answers are lost with 3% and won with 1%, so that the loss is exactly the margin."""
    draw, passed = np.random.default_rng(2), 0
    for _ in range(1000):
        lost, won = draw.multinomial(100, [0.03, 0.01, 0.96])[:2]
        before = correct_rows([True] * lost + [False] * (100 - lost))
        after = correct_rows([False] * lost + [True] * won + [False] * (100 - lost - won))
        passed += replace(COMPARISON, level=0.05).accuracy("old", "multiple choice", "not worse", before, after).passed
    assert passed <= 70  # 50 are expected


def test_bounds_of_few_records_are_those_of_students_t() -> None:
    """At a level of a late use; percentiles alone would be narrower by a sixth."""
    noise = norm.ppf((np.arange(20) + 0.5) / 20)
    rows = [
        [{"id": i, "nats": v, "num_bytes": 4} for i, v in enumerate(one)] for one in (np.full(20, 1.0), 1.0 + noise)
    ]
    measure = replace(COMPARISON, level=0.001).costs("old", "bits", "not worse", *rows)
    expected = float(t.ppf(0.999, 19)) * noise.std(ddof=1) / np.sqrt(20)
    assert (measure.high, -measure.low) == pytest.approx((expected, expected), rel=0.08)


def test_a_single_record_says_nothing() -> None:
    """Neither a benchmark with a single text beside conversations is frozen, nor does one pass that was."""
    rows = [[{"id": 0, "nats": nats, "num_bytes": 4}] for nats in (1.0, 0.5)]
    for rule in ("not worse", "better"):
        measure = COMPARISON.costs("old", "bits", rule, *rows)
        assert (measure.low, measure.high, measure.passed) == (-float("inf"), float("inf"), False)


def test_a_benchmark_has_no_single_text_beside_conversations(world: World, tmp_path: Path) -> None:
    mixed = write_records(tmp_path / "mixed.jsonl", [*old_records(range(60)), {"text": "A text of its own kind."}])
    with pytest.raises(DataError, match="--old: one of its halves has a single text"):
        freeze_benchmark([str(mixed)], [str(world.file("new-heldout"))], tmp_path / "bench")


def test_texts_are_checked_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source with garbage that comes last is not passed over."""
    monkeypatch.setattr("modelwright_continual.gate.judge.MOST_CHECKED", 100)
    clean, last = new_records(range(300)), garbage(300)
    checked = {one.id for one in drawn_texts([document(one) for one in [*clean, *last]])}
    assert len(checked) == 100
    assert 30 <= len(checked & {one["question"] for one in last}) <= 70


def test_small_levels_get_more_resamples() -> None:
    assert replace(COMPARISON, level=0.05 / 110).num_resamples == 44_000
    assert COMPARISON.num_resamples == 2000


def test_a_verdict_that_was_changed_is_damaged(world: World, tmp_path: Path) -> None:
    with write_artifact(tmp_path / "gate", kind="gate", digest="x") as draft:
        write_atomic(draft.path / VERDICT, json.dumps({"passed": False}))
    path = tmp_path / "gate" / VERDICT
    path.write_text(path.read_text().replace("false", "true "))
    with pytest.raises(ArtifactError, match="damaged"):
        Verdict.read(tmp_path / "gate")


def test_a_benchmark_needs_enough_texts(world: World, tmp_path: Path) -> None:
    few = write_records(tmp_path / "few.jsonl", old_records(range(30)))
    with pytest.raises(DataError, match="at least 40"):
        freeze_benchmark([str(few)], [str(world.file("new-heldout"))], tmp_path / "bench")
