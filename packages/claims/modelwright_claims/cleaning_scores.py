"""Precision and recall of each step of cleaning on a spoiled corpus (`spoiled_corpus.py`), and the usable share before
and after.

What counts:

- quality, noise: a dropped document is right if it was boilerplate, keyword spam or shuffled words. One in a broken
  encoding does not count.
- duplicates: a dropped document is right if it is a copy or has one, with a Jaccard similarity of at least
  `clean.duplicates.min_jaccard`. A pair is found if one of both is dropped. Duplicates that the text had before it was
  spoiled count as false alarms; spoil text that was cleaned.
- privacy: a value is found if it is gone from the kept text. A marker more than there were values is a false alarm.
- format: a broken encoding is found if the text is the right one again. A change of any other text, beyond what
  normalization does, is a false alarm.
- usable: not spoiled, or a copy below the threshold, or the last of a pair; with personal data or in a broken encoding
  only where that was mended.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.steps.format import Format, normalize
from modelwright.data.clean.steps.step import Drop
from modelwright.data.document import Document
from modelwright.pipeline.cleaning import engine_of
from modelwright_claims.spoiled_corpus import BROKEN, COPY, DOCUMENTS, JUNK, LABELS, PERSONAL, Label

_JUDGES = ("quality", "noise")
_MARKER = re.compile(r"<[A-Z_]+_\d+>")


@dataclass
class Score:
    """found, missed: of what the step should find; false: what it took for it."""

    found: int = 0
    missed: int = 0
    false: int = 0

    @property
    def precision(self) -> float | None:
        total = self.found + self.false
        return self.found / total if total else None

    @property
    def recall(self) -> float | None:
        total = self.found + self.missed
        return self.found / total if total else None


@dataclass
class Result:
    """By step; recall by step and form; documents: of the corpus; before, after: usable ones of all and of those
    kept; kept: documents.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    forms: dict[tuple[str, str], Score] = field(default_factory=dict)
    documents: int = 0
    before: int = 0
    kept: int = 0
    after: int = 0

    def count(self, step: str, form: str, found: bool) -> None:
        for score in (self.scores.setdefault(step, Score()), self.forms.setdefault((step, form), Score())):
            score.found += found
            score.missed += not found


def read_spoiled(folder: Path) -> list[tuple[Document, Label]]:
    """The documents of a spoiled corpus, each with its label."""
    entries: list[tuple[Document, Label]] = []
    with open(folder / DOCUMENTS, encoding="utf-8") as documents, open(folder / LABELS, encoding="utf-8") as labels:
        for line, said in zip(documents, labels, strict=True):
            record, label = json.loads(line), json.loads(said)
            label["values"] = tuple((kind, value) for kind, value in label["values"])
            entries.append((document_of(record["id"], record["text"]), Label(**label)))
    return entries


def document_of(name: str, text: str) -> Document:
    """A spoiled text as a document of a corpus."""
    return Document(id=name, text=text, kind="prose", split="open", source="spoiled")


def judge_cleaning(entries: Sequence[tuple[Document, Label]], config: CleanConfig) -> Result:
    """Clean the documents and compare what was done with their labels."""
    kept, dropped = clean_entries(entries, config)
    return compare(entries, kept, dropped, config)


def clean_entries(
    entries: Sequence[tuple[Document, Label]], config: CleanConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts that cleaning keeps, by the id of the document, and the step that dropped each other document."""
    with tempfile.TemporaryDirectory() as name:
        documents = (document for document, _ in entries)
        clean_documents(documents, build_steps(config), Path(name), SilentProgress(), engine=engine_of(config))
        kept = {document.id: document.text for document in read_kept(Path(name))}
        dropped = {entry.document.id: entry.step for entry in read_dropped(Path(name))}
    return kept, dropped


def compare(
    entries: Sequence[tuple[Document, Label]], kept: Mapping[str, str], dropped: Mapping[str, str], config: CleanConfig
) -> Result:
    """Compare what `clean_entries` gave with the labels."""
    result = Result(documents=len(entries), kept=len(kept))
    _count_drops(result, [label for _, label in entries], dropped, config.duplicates.min_jaccard)
    _count_values(result, entries, kept)
    _count_repairs(result, entries, config)
    _count_usable(result, entries, kept, config)
    return result


def _count_drops(result: Result, labels: Sequence[Label], dropped: Mapping[str, str], min_jaccard: float) -> None:
    pairs = {(label.of, label.id) for label in labels if label.form == COPY and label.similarity >= min_jaccard}
    in_pair = {name for pair in pairs for name in pair}
    bad = {label.id for label in labels if label.form in (*JUNK, BROKEN)}
    for label in labels:
        step = dropped.get(label.id, "")
        if label.form in JUNK:
            result.count("quality, noise", label.form, step in _JUDGES)
        if (label.of, label.id) in pairs:
            steps = {step, dropped.get(label.of, "")}
            if steps <= {"", "duplicates"}:  # a pair of which another step dropped one is no pair any more
                result.count("duplicates", f"copies from {_level(label.similarity)}", "duplicates" in steps)
    for name, step in dropped.items():
        if step in _JUDGES and name not in bad:
            result.scores.setdefault("quality, noise", Score()).false += 1
        if step == "duplicates" and name not in in_pair:
            result.scores.setdefault("duplicates", Score()).false += 1


def _level(similarity: float) -> str:
    return next((f"{level:.2f}" for level in (0.95, 0.9, 0.85) if similarity >= level), "lower")


def _count_values(result: Result, entries: Sequence[tuple[Document, Label]], kept: Mapping[str, str]) -> None:
    for document, label in entries:
        if document.id not in kept or label.form in JUNK or label.form == BROKEN:
            continue
        text = kept[document.id]
        found = [value not in text for _, value in label.values]
        for (kind, _), is_found in zip(label.values, found, strict=True):
            result.count("privacy", kind, is_found)
        markers = len(_MARKER.findall(text)) - len(_MARKER.findall(document.text))
        if label.form == PERSONAL or markers:
            result.scores.setdefault("privacy", Score()).false += max(0, markers - sum(found))


def _count_repairs(result: Result, entries: Sequence[tuple[Document, Label]], config: CleanConfig) -> None:
    step = Format(config.format)
    for document, label in entries:
        formatted = step(document)
        text = "" if isinstance(formatted, Drop) else formatted.text
        if label.form == BROKEN:
            result.count("format", BROKEN, text == label.right)
        elif label.form not in JUNK and text != normalize(document.text):
            result.scores.setdefault("format", Score()).false += 1


def _count_usable(
    result: Result, entries: Sequence[tuple[Document, Label]], kept: Mapping[str, str], config: CleanConfig
) -> None:
    step, level = Format(config.format), config.duplicates.min_jaccard
    for document, label in entries:
        is_second = label.form == COPY and label.similarity >= level
        is_good = label.form not in (*JUNK, PERSONAL, BROKEN)
        result.before += is_good and not is_second
        if document.id not in kept:
            continue
        text = kept[document.id]
        if label.form == PERSONAL:
            is_good = not any(value in text for _, value in label.values)
        elif label.form == BROKEN:
            formatted = step(document)
            is_good = not isinstance(formatted, Drop) and formatted.text == label.right
        if is_second:
            is_good = label.of not in kept
        result.after += is_good
