"""Corpora with every form of duplicate and every kind of drop, drawn by a fixed generator."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.fingerprints import DuplicatesConfig
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.document import Document, Kind, Split

_WORDS = [
    "the", "a", "of", "to", "in", "and", "is", "was", "for", "it", "with", "on", "that", "this", "from", "by", "which",
    "city", "river", "engine", "letter", "market",
]  # fmt: skip


def documents(seed: int, count: int, after: int = 0) -> Iterator[Document]:
    """Prose, code and pairs, of both splits: new ones, copies with changes, parts, templated pages, and bad text.
    after: seed of a corpus of which there are copies, too.
    """
    rng = random.Random(seed)
    template = _words(rng, 80)
    known: list[list[str]] = [_words(rng, 100)]
    known += [one.text.split() for one in documents(after, count)] if after else []
    for number in range(count):
        words = list(rng.choice(known))
        match rng.randrange(12):
            case 0:
                pass
            case 1 | 2:
                at = rng.randrange(len(words))
                words[at : at + rng.randrange(1, 6)] = _words(rng, rng.randrange(1, 6))
            case 3:
                at = rng.randrange(max(1, len(words) - 45))
                words = words[at : at + rng.randrange(20, 60)]
            case 4:
                words = [*_words(rng, 10), *words, *_words(rng, 30)]
            case 5:
                words = [*template[:40], *_words(rng, 30), *template[40:]]
            case 6:
                words = ["buy cheap now"] * 40
            case _:
                words = _words(rng, rng.randrange(30, 200))
        known.append(words)
        kind: Kind = rng.choices(("prose", "code", "qa"), (8, 2, 3))[0]
        split: Split = "heldout" if rng.random() < 0.08 else "train"
        text, meta = " ".join(words), {}
        if kind == "qa":
            question = f"What about {number}?"
            meta = {"question": question, "answer": text}
            text = f"{question}\n\n{text}"
        yield Document(id=f"d{number}", text=text, kind=kind, split=split, source="mixed", meta=meta)


def _words(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.choice(_WORDS)}" if rng.random() < 0.5 else f"word{rng.randrange(400)}" for _ in range(count)]


def dropped(
    folder: Path, seed: int, *, thresholds: str = "fixed", index: str = "", key: str = "", after: int = 0
) -> list[tuple[str, ...]]:  # fmt: skip
    """What cleaning drops of a corpus: id, step, reason and detail."""
    limits = {"max_sorted_fraction": 1.0, "max_misordered_fraction": 1.0}
    config = CleanConfig(
        quality=QualityConfig(thresholds="auto" if thresholds == "auto" else "fixed", limits=limits),
        duplicates=DuplicatesConfig(index=index),
    )
    clean_documents(
        documents(seed, 1500, after), build_steps(config), folder, SilentProgress(), key=key, shard_documents=170
    )  # fmt: skip
    return [(one.document.id, one.step, one.reason, one.detail) for one in read_dropped(folder)]


def digest(drops: list[tuple[str, ...]]) -> str:
    return hashlib.sha256(repr(drops).encode()).hexdigest()[:16]
