"""The texts of the demonstration: documentation that every installation has.

Old texts are docstrings of Python's standard library; new ones those of PyTorch and NumPy, which the first model has
never seen. The split is by module, so that nothing of a held-out module is trained on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelwright.core.artifacts import is_finished, read_manifest, write_artifact
from modelwright.core.errors import ArtifactError, DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split
from modelwright.data.stdlib_corpus import machine_corpus

KIND = "demo-texts"
SOURCES = {"old": ("python:stdlib", "python:topics"), "new": ("python:torch", "python:numpy")}
"""The `source` of machine documents by task."""
LONGEST_CHARS = 4_000
FEWEST_CHARS = 100
MOST_HELDOUT = 300
"""Held-out documents of each task, of which the benchmark makes its halves."""


@dataclass(frozen=True)
class DemoTexts:
    """Files `old.jsonl`, `new.jsonl`, `old-heldout.jsonl` and `new-heldout.jsonl` in a folder."""

    folder: Path

    def train(self, task: str) -> str:
        return str((self.folder / f"{task}.jsonl").resolve())

    def heldout(self, task: str) -> str:
        return str((self.folder / f"{task}-heldout.jsonl").resolve())

    def prompts(self, task: str) -> list[str]:
        """What users of the demonstration write: how held-out documents begin."""
        with open(self.heldout(task), encoding="utf-8") as file:
            return [_beginning(Document.from_json(line).text) for line in file]


def write_texts(folder: Path, fraction: float) -> DemoTexts:
    """Write the files, or find them. fraction: of the machine's modules. Raises `ArtifactError` if the folder has those
    of another version of the libraries or another fraction.
    """
    texts, documents = DemoTexts(folder), _documents(fraction)
    if is_finished(folder):
        if read_manifest(folder, kind=KIND, verify=True).facts["fraction"] != fraction:
            raise ArtifactError(f"{folder}: has another share of the machine's texts; choose another --run-dir")
        return texts
    by_file: dict[str, list[Document]] = {}
    for task, document in documents:
        suffix = "-heldout" if document.split == "heldout" else ""
        by_file.setdefault(f"{task}{suffix}", []).append(document)
    with write_artifact(folder, kind=KIND, digest="") as draft:
        for task in SOURCES:
            for name in (task, f"{task}-heldout"):
                chosen = by_file.get(name, [])
                if not chosen:
                    raise DataError(f"{name}: this machine's libraries have no such text; give a larger fraction")
                limit = MOST_HELDOUT if name.endswith("heldout") else len(chosen)
                _write(draft.path / f"{name}.jsonl", _drawn(chosen, limit))
                draft.facts[name] = min(limit, len(chosen))
        draft.facts["fraction"] = fraction
    return texts


def _documents(fraction: float) -> Iterator[tuple[str, Document]]:
    """Prose with its task, each text once: libraries repeat docstrings, and one could be both held out and learned.

    Held-out documents come first, so that of two equal ones the held-out one stays.
    """
    tasks = {source: task for task, sources in SOURCES.items() for source in sources}
    prose = [
        document
        for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None)
        if document.kind == "prose" and FEWEST_CHARS <= len(document.text) <= LONGEST_CHARS
    ]
    seen: set[str] = set()
    for split in ("heldout", "train"):
        for document in prose:
            body = document.text.partition("\n\n")[2]
            if document.split == split and body not in seen:
                seen.add(body)
                yield tasks[document.source], _plain(document, split)


def _plain(document: Document, split: Split) -> Document:
    return replace(document, split=split, meta={})


def _drawn(documents: Sequence[Document], limit: int) -> list[Document]:
    return sorted(documents, key=lambda document: derive_seed(0, KIND, document.id))[:limit]


def _write(path: Path, documents: Iterable[Document]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(document.to_json() + "\n")


def _beginning(text: str) -> str:
    """About a quarter of a document, at most 160 characters, cut at a word."""
    return text[: min(160, max(40, len(text) // 4))].rpartition(" ")[0] or text[:40]
