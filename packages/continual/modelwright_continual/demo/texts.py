"""The texts of the demonstration: documentation that every installation includes.

Old texts are docstrings of Python's standard library; new texts are docstrings of PyTorch and NumPy, which the first
model has never seen. The split is by module, so that no part of a held-out module is trained on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelwright.core.artifacts import is_finished, read_manifest, write_artifact
from modelwright.core.config import DataError, derive_seed
from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright_continual.demo.size import DemoSize

KIND = "demo-texts"
SOURCES = {"old": ("python:stdlib", "python:topics"), "new": ("python:torch", "python:numpy")}
"""Values of `source` of machine documents, by task."""
LONGEST_CHARS = 4_000
FEWEST_CHARS = 100
HELDOUT_FRACTION = 1 / 8
"""Share of the modules that are held out of training."""


@dataclass(frozen=True)
class DemoTexts:
    """Files `old.jsonl`, `new.jsonl`, `old-heldout.jsonl` and `new-heldout.jsonl` in a folder."""

    folder: Path

    def train(self, task: str) -> str:
        return str((self.folder / f"{task}.jsonl").resolve())

    def heldout(self, task: str) -> str:
        return str((self.folder / f"{task}-heldout.jsonl").resolve())

    def prompts(self, task: str) -> list[str]:
        """Returns the prompts of the demonstration's users: the beginnings of held-out documents."""
        with open(self.heldout(task), encoding="utf-8") as file:
            return [_beginning(Document.from_json(line).text) for line in file]


def write_texts(folder: Path, size: DemoSize) -> DemoTexts:
    """Writes the files unless they exist. Raises `DataError` if this machine's libraries have too few texts."""
    if is_finished(folder):
        read_manifest(folder, kind=KIND, verify=True)
        return DemoTexts(folder)
    by_file: dict[str, list[Document]] = {}
    for name, document in _documents(size.fraction):
        by_file.setdefault(name, []).append(document)
    with write_artifact(folder, kind=KIND, digest="") as draft:
        for task, most in size.most.items():
            for name, limit in ((task, most), (f"{task}-heldout", size.most_heldout)):
                chosen = _drawn(by_file.get(name, []), limit)
                if not chosen:
                    raise DataError(f"{name}: no such text was found on this machine; install Python with its sources")
                _write(draft.path / f"{name}.jsonl", chosen)
                draft.facts[name] = len(chosen)
    return DemoTexts(folder)


def _documents(fraction: float) -> Iterator[tuple[str, Document]]:
    """Yields prose with the name of its file, each text once: libraries repeat docstrings, and one could otherwise be
    both held out and trained on. Held-out documents come first, so that of two equal ones the held-out one stays.
    """
    tasks = {source: task for task, sources in SOURCES.items() for source in sources}
    prose = [
        document
        for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None)
        if document.kind == "prose" and FEWEST_CHARS <= len(document.text) <= LONGEST_CHARS
    ]
    seen: set[str] = set()
    for suffix in ("-heldout", ""):
        for document in prose:
            # The first paragraph is the document's title, which differs between modules that share a docstring.
            body = document.text.partition("\n\n")[2]
            if _is_heldout(document) == bool(suffix) and body not in seen:
                seen.add(body)
                yield f"{tasks[document.source]}{suffix}", replace(document, split="open", meta={})


def _is_heldout(document: Document) -> bool:
    # Seeds have 63 bits, so this holds for a share of `HELDOUT_FRACTION` of the modules.
    return derive_seed(0, KIND, "heldout", document.meta["module"]) < HELDOUT_FRACTION * 2**63


def _drawn(documents: Sequence[Document], limit: int) -> list[Document]:
    return sorted(documents, key=lambda document: derive_seed(0, KIND, document.id))[:limit]


def _write(path: Path, documents: Iterable[Document]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(document.to_json() + "\n")


def _beginning(text: str) -> str:
    """Returns about a quarter of a document, at most 160 characters, cut at a word."""
    return text[: min(160, max(40, len(text) // 4))].rpartition(" ")[0] or text[:40]
