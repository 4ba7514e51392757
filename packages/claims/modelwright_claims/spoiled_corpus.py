"""Spoils clean text in known ways, with a label for each document, to check what cleaning finds and what it costs.

A folder of spoiled text has `documents.jsonl` (id and text) and beside it `labels.jsonl`, a line for each document: its
id, its form of spoiling ("" for none), and what is known of it: the right text, the values of personal data, or the
document that it copies and their Jaccard similarity. Equal texts, options and seeds give equal files.

Forms: boilerplate, keyword spam and shuffled words take the place of a document; personal data and broken encodings
change one that stays good otherwise; copies are added to their originals.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from faker import Faker

from modelwright.core.seeds import derive_seed
from modelwright.data.clean.fingerprints import jaccard, shingles
from modelwright.data.clean.noise import keyword_spam, menus, shuffled_words
from modelwright.data.clean.steps.format import normalize
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
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
"""What a text was meant as, and what it was read as."""
_TYPOGRAPHIC = str.maketrans({"'": "’", '"': "”", "-": "–"})


@dataclass(frozen=True, kw_only=True)
class Label:
    """What was done to a document. right: the text without the mistake; values: (kind, value) of personal data; of: the
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
    """Each text as it is or spoiled, and copies of some. share: of the texts that are spoiled or copied, in equal
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
