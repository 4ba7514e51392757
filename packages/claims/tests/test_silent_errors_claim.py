"""The cases of `silent_errors`, the comparison of a tool's examples with what a file says, and the verdict."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright_claims import reader_worker, silent_errors
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.launch import answer_of
from modelwright_claims.reader_cases import CASES, DOCUMENTS, FACTORY, OURS, TRL, Case, Record
from modelwright_claims.reader_outcomes import (
    EXACT,
    OUTCOMES,
    REFUSED,
    SAID,
    SILENT,
    Reading,
    outcome_of,
    read_own,
    write_model,
)
from modelwright_claims.silent_errors import DOCUMENTED, OUTCOME


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_model(tmp_path_factory.mktemp("models") / "bytes")


def case(*records: Record) -> Case:
    return Case(name="made up", content=b"", records=records, about="weight|T002")


def reading(
    tokenizer: Tokenizer, *parts: tuple[str, bool], log: str = "", error: str = "", is_rejected: bool = False
) -> Reading:
    """One example of texts that are learned and texts that are not."""
    ids, labels = list[int](), list[int]()
    for text, is_learned in parts:
        more = tokenizer.chat.encode_rendered(text)
        ids += more
        labels += more if is_learned else [-100] * len(more)
    return Reading(examples=[(ids, labels, is_rejected)], log=log, error=error)


ASKED, ANSWER, BAD = "<|im_start|>user\nT002?<|im_end|>\n", "T002 has SALT.<|im_end|>", "T002 has BADANSWER.<|im_end|>"
RECORD = Record(key="T002", learned=("T002 has SALT.",), context=("T002?",))


def kind(tokenizer: Tokenizer, given: Reading, record: Record = RECORD) -> str:
    return OUTCOMES[outcome_of(case(record), given, tokenizer)[0]]


def test_what_the_file_says_is_exact(tokenizer: Tokenizer) -> None:
    assert kind(tokenizer, reading(tokenizer, (ASKED, False), (ANSWER, True))) == "exact"
    judged = Record(key="T002", rejected=("T002 has SALT.",))
    assert kind(tokenizer, reading(tokenizer, (ASKED, False), (ANSWER, True), is_rejected=True), judged) == "exact"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(ASKED, False), ("T002 has .", True)], "does not learn"),
        ([(ASKED, False), (ANSWER, False)], "does not learn"),
        ([(ASKED, False), (BAD, True), (ANSWER, True)], "learns 't002 has badanswer.'"),
        ([(ASKED, False), (ANSWER, True), (ANSWER, True)], "learns 't002 has salt.'"),
        ([("T002!", False), (ANSWER, True)], "lacks the context"),
        ([(ASKED, True), (ANSWER, True)], "learns"),
        ([("T001?", False), ("T001 has SALT.", True)], "is in no example"),
    ],
)
def test_a_word_that_is_dropped_or_added_is_silent_unless_the_log_names_it(
    tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]], why: str
) -> None:
    found, reason = outcome_of(case(RECORD), reading(tokenizer, *parts), tokenizer)
    assert found == SILENT
    assert why in reason
    for log, expected in (
        ("the field 'weight' is ignored in 1 record", SAID),
        ("Dropped invalid example: T002", SAID),
        ("the field 'weight' is of type int\nsome records were dropped", SILENT),
        ("T002?\nT002 has SALT.", SILENT),
    ):
        assert outcome_of(case(RECORD), reading(tokenizer, *parts, log=log), tokenizer)[0] == expected, log


def test_an_error_is_a_refusal_and_where_only_that_is_right_anything_else_is_silent(tokenizer: Tokenizer) -> None:
    refused = Reading(error="two columns of one name")
    learned = reading(tokenizer, (ASKED, False), (ANSWER, True))
    assert outcome_of(case(RECORD), refused, tokenizer)[0] == REFUSED
    assert outcome_of(case(), refused, tokenizer)[0] == REFUSED
    assert outcome_of(case(), learned, tokenizer) == (SILENT, "is not refused")


def test_words_and_texts_of_special_tokens_are_told_apart(tokenizer: Tokenizer) -> None:
    said = "T002 ends by <|im_end|>, so."
    record = Record(key="T002", learned=(said,))
    assert kind(tokenizer, reading(tokenizer, (said, True)), record) == "silent"
    plain = tokenizer.encode(said)
    assert kind(tokenizer, Reading(examples=[(plain, plain, False)]), record) == "exact"
    thought = Record(key="T002", learned=("<think>T002</think>",), tokens=("<think>",))
    word = tokenizer.id_of("<think>")
    assert kind(tokenizer, reading(tokenizer, ("<think>T002</think>", True)), thought) == "exact"
    pieces = [one for part in ("<thi", "nk>T002</think>") for one in tokenizer.encode(part)]
    assert word not in pieces
    assert kind(tokenizer, Reading(examples=[(pieces, pieces, False)]), thought) == "silent"


def judged(ours: Sequence[int], theirs: Sequence[int] | None, documented: Sequence[int] | None = None) -> Verdict:
    samples = {OUTCOME + OURS: [float(one) for one in ours], DOCUMENTED + OURS: [1.0] * len(ours)}
    if theirs is not None:
        samples[OUTCOME + TRL] = [float(one) for one in theirs]
        samples[DOCUMENTED + TRL] = [float(one) for one in documented or [1] * len(theirs)]
    conditions = {f"silent, {OURS}": "turn with weight 0 (learns 'bad')"}
    return judge(silent_errors.CLAIM, Measurement(samples=samples, conditions=conditions))


def test_the_verdict_asks_for_none_of_ours_and_for_a_lower_share_than_others() -> None:
    good, bad = [EXACT] * 30 + [REFUSED] * 8 + [SAID] * 2, [EXACT] * 28 + [SILENT] * 12
    met = judged(good, bad)
    assert met.kind == "met"
    assert met.figures[f"silent, {TRL}, documented"].value == pytest.approx(30)
    assert met.figures[f"silent, {OURS}, documented by {TRL}"].upper == pytest.approx(7.2, abs=0.1)
    assert met.figures[f"refused, {OURS}"].value == 8
    names = {one for one in silent_errors.CLAIM.headline if "LLaMA" not in one and "Axolotl" not in one}
    assert names <= met.figures.keys()
    one = judged([SILENT, *good[1:]], bad)
    assert one.kind == "short"
    assert "turn with weight 0" in one.reason
    assert judged(good, [EXACT] * 37 + [SILENT] * 3).kind == "short"
    assert judged(good, bad, documented=[1] * 30 + [0] * 10).kind == "short", "two of 30 documented forms"
    assert judged(good, None).kind == "not judged"


def test_every_case_has_its_own_name_and_a_form_that_another_tool_documents() -> None:
    assert len({one.name for one in CASES}) == len(CASES) >= 40
    assert all(DOCUMENTS[one.form] for one in CASES)
    assert sum(one.is_documented(FACTORY) for one in CASES) >= 25
    keys = [record.key for one in CASES for record in one.records]
    assert all(keys)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("turn with weight 0", EXACT),
        ("calls with different arguments", EXACT),
        ("several rejected answers", EXACT),
        ("kto_tag", EXACT),
        ("two columns of one name", REFUSED),
        ("answer longer than a row", SAID),
    ],
)
def test_each_kind_of_rows_is_read_back(tmp_path: Path, name: str, expected: int) -> None:
    (chosen,) = (one for one in CASES if one.name == name)
    tokenizer, path = write_model(tmp_path / "model"), tmp_path / f"records{chosen.suffix}"
    path.write_bytes(chosen.content)
    found = read_own(chosen, path, tmp_path / "model")
    assert outcome_of(chosen, found, tokenizer)[0] == expected
    if expected == EXACT:
        ids, labels, is_rejected = found.examples[0]
        unlearned = Reading(examples=[(ids, [-1] * len(labels), is_rejected), *found.examples[1:]])
        assert outcome_of(chosen, unlearned, tokenizer)[0] == SILENT


@pytest.mark.slow
def test_our_reader_says_what_it_does_not_learn(tmp_path: Path) -> None:
    """The product on every file. A silent error is named by the assertion; the file stays as it is."""
    measurement = silent_errors.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert measurement.conditions[f"silent, {OURS}"] == "none"
    outcomes = measurement.samples[OUTCOME + OURS]
    assert len(outcomes) == len(CASES)
    assert outcomes.count(EXACT) > len(CASES) / 2, "a reader that refuses everything proves nothing"
    assert measurement.conditions["tools that are not installed"] == ", ".join(silent_errors.PYTHONS)
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_a_tool_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, _ in silent_errors.PYTHONS.values():
        monkeypatch.setenv(variable, str(tmp_path / "python"))
    assert silent_errors.find_interpreters() == {}


def test_the_worker_keeps_what_each_file_wrote_and_why_it_was_refused(tmp_path: Path) -> None:
    def read(given: Mapping[str, str], folder: Path) -> Iterator[tuple[list[int], list[int], bool]]:
        os.write(1, b"about " + given["path"].encode())  # print goes to a file of pytest
        if given["path"] == "bad":
            raise ValueError("no such column")
        if given["path"] == "gone":
            sys.exit(3)
        yield [1, 2], [-100, 2], False

    found = [reader_worker.in_child(read, {"path": name}, tmp_path / name) for name in ("good", "bad", "gone")]
    assert found[0] == {"examples": [[[1, 2], [-100, 2], False]], "error": "", "log": "about good"}
    assert (found[1]["error"], found[1]["examples"]) == ("ValueError: no such column", [])
    assert found[2]["error"] == "SystemExit: 3"
    json.dumps(found)


def test_the_worker_asks_for_nothing_of_the_product(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-S", reader_worker.__file__, TRL]
    assert answer_of(command, "worker", text="{}", env={}, cwd=tmp_path) == ""
