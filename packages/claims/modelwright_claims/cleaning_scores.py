"""Precision and recall of each step of cleaning on a spoiled corpus (`cleaning_scores.py`), and the usable share before
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
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from faker import Faker

from modelwright.core.config import derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.fingerprints import jaccard, shingles
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.steps.format import Format, normalize
from modelwright.data.clean.steps.noise import keyword_spam, menus, shuffled_words
from modelwright.data.clean.steps.step import Drop
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import engine_of
from modelwright_claims.personal_values import KEYS, VALUES

DOCUMENTS, LABELS = "documents.jsonl", "labels.jsonl"
JUNK = {"boilerplate": menus, "keyword spam": keyword_spam, "shuffled words": shuffled_words}
"""Forms that leave nothing of the document worth keeping. The step noise learns from the same generators; how it
does on junk that nobody showed it is in its own report."""
LEVELS = (0.98, 0.95, 0.9, 0.87, 0.83, 0.75, 0.6)
"""Jaccard similarities of word 5-grams that copies are made for."""
PERSONAL, BROKEN, COPY = "personal data", "broken encoding", "copy"
COPIES = tuple(f"{COPY} {level}" for level in LEVELS)
FORMS = (*JUNK, PERSONAL, BROKEN, *COPIES)
_FEWEST_WORDS, _MOST_CHARS = 80, 6000
_MOST_REFUSED = 4
_MISTAKES = (("utf-8", "sloppy-windows-1252"), ("utf-8", "latin-1"), ("utf-8", "sloppy-windows-1251"),
             ("cp1251", "latin-1"), ("koi8-r", "sloppy-windows-1251"), ("gb18030", "latin-1"), ("utf-8", "gb18030"),
             ("cp932", "latin-1"), ("cp1253", "latin-1"), ("cp1256", "latin-1"))  # fmt: skip
"""Pairs of the intended meaning of a text and the meaning that was read."""
_TYPOGRAPHIC = str.maketrans({"'": "’", '"': "”", "-": "–"})


@dataclass(frozen=True, kw_only=True)
class Label:
    """The spoiling of a document. right: the text without the mistake; values: (kind, value) of personal data; of: the
    original of a copy; similarity: exact Jaccard similarity to it.
    """

    id: str
    form: str = ""
    right: str = ""
    values: tuple[tuple[str, str], ...] = field(default=())
    of: str = ""
    similarity: float = 0.0


def spoil(
    texts: Sequence[str], share: float, seed: int, *, forms: Sequence[str] = FORMS
) -> Iterator[tuple[str, Label]]:
    """Each text unchanged or spoiled, and copies of some. share: of the texts that are spoiled or copied, in equal
    parts by form.
    """
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    chosen = {number: forms[place % len(forms)] for place, number in enumerate(order[: round(share * len(texts))])}
    for number, text in enumerate(texts):
        rng = random.Random(derive_seed(seed, "spoil", text))
        name, form = f"d{number}", chosen.get(number, "")
        if form in JUNK:
            yield JUNK[form](text, rng), Label(id=name, form=form)
        elif form == PERSONAL:
            spoiled, values = _with_values(text, rng)
            yield spoiled, Label(id=name, form=form, right=text, values=values)
        elif form == BROKEN:
            spoiled, right = _broken(text, rng)
            yield spoiled, Label(id=name, form=form if spoiled != right else "", right=right)
        else:
            yield text, Label(id=name)
        if form.startswith(COPY):
            copy, similarity = _copy(text, float(form.rpartition(" ")[2]), rng)
            yield copy, Label(id=f"{name}-copy", form=COPY, of=name, similarity=similarity)


def _with_values(text: str, rng: random.Random) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A text with sentences that have personal data, at ends of lines or words."""
    words, values = text.split(" "), list[tuple[str, str]]()
    Faker.seed(rng.randrange(2**32))  # of all locales, of which the generators make their own
    fake = Faker("en_US")
    for _ in range(rng.randrange(1, 4)):
        kind = rng.choice([*VALUES, "secret"])
        value = KEYS[rng.choice(list(KEYS))](rng) if kind == "secret" else VALUES[kind](fake, rng)[0]
        written = value.replace("[[", "").replace("]]", "")
        value = value[value.index("[[") + 2 : value.index("]]")] if "[[" in value else value
        named = {"national_id": "social security number", "ip": "IP address", "card": "credit card"}.get(kind, kind)
        words.insert(rng.randrange(len(words)), f"(Her {named} is {written} .)")
        values.append((kind, value))
    return " ".join(words), tuple(values)


def _broken(text: str, rng: random.Random) -> tuple[str, str]:
    """A text in the wrong encoding, and the right one, which has typographic signs where it had no other characters
    beyond ASCII. Both are equal if no mistake keeps the text.
    """
    right = normalize(text.translate(_TYPOGRAPHIC) if text.isascii() else text)
    for meant, read_as in rng.sample(_MISTAKES, len(_MISTAKES)):
        try:
            wrong = right.encode(meant).decode(read_as)
        except UnicodeError:
            continue
        if wrong != right:
            return wrong, right
    return right, right


def _copy(text: str, level: float, rng: random.Random) -> tuple[str, float]:
    """A copy in which words are replaced, one after another, while its similarity to the text is at least `level`, and
    that similarity. The last word comes first: in a short text it alone may be replaced for a high level.
    """
    parts, own = re.split(r"(\w+)", text), np.unique(shingles(text))
    places = list(range(1, len(parts), 2))  # of words
    best, similarity, num_refused = text, 1.0, 0
    for place in places[-1:] + rng.sample(places, len(places)):
        before, parts[place] = parts[place], parts[rng.choice(places)][::-1] + "o"
        changed = "".join(parts)
        reached = jaccard(own, np.unique(shingles(changed)))
        if reached >= level:
            best, similarity = changed, reached
        else:
            parts[place], num_refused = before, num_refused + 1
        if num_refused == _MOST_REFUSED:
            break
    return best, similarity


def clean_texts(sources: tuple[str, ...], most: int) -> list[str]:
    """Different texts of prose of the sources with enough words, no longer than some pages."""
    config = SourceConfig(sources=sources, validation_fraction=0.0)
    documents: Iterator[Document] = read_documents(config, report=SourceReport())
    texts: dict[str, None] = {}
    for document in documents:
        text = normalize(document.text[:_MOST_CHARS])
        if document.kind == "prose" and len(text.split()) >= _FEWEST_WORDS:
            texts[text] = None
        if len(texts) == most:
            break
    return list(texts)


def write(folder: Path, spoiled: Iterator[tuple[str, Label]]) -> int:
    """Write the documents and their labels; returns the number of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with open(folder / DOCUMENTS, "w", encoding="utf-8") as documents, open(folder / LABELS, "w") as labels:
        for text, label in spoiled:
            documents.write(json.dumps({"id": label.id, "text": text}, ensure_ascii=False) + "\n")
            labels.write(json.dumps(asdict(label)) + "\n")
            count += 1
    return count


_JUDGES = ("quality", "noise")
_MARKER = re.compile(r"<[A-Z_]+_\d+>")


@dataclass
class Score:
    """found, missed: of those that the step should find; false: those that it found by mistake."""

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
    """Scores by step, and by step and form; documents: of the corpus; before, after: usable ones of all and of those
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
    """Clean the documents and compare the result with their labels."""
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
