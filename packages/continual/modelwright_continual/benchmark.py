"""A frozen benchmark: texts of old and of new tasks, each in a validation half and a test half.

Choices (the weight of an average, a learning rate) are made on the validation half. The test half is reserved for the
gate, which counts every use. Use k has bounds at level a_k = a / (k (k + 1)). These levels sum to a, which therefore
limits the probability of an error over all uses together, provided that each bound holds its level.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from modelwright.core.artifacts import (
    ArtifactError,
    is_finished,
    lock_folder,
    make_folder,
    read_manifest,
    write_artifact,
    write_atomic,
)
from modelwright.core.config import ConfigError, DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright_continual.heldout import question_key, text_key

KIND = "benchmark"
USES = "uses.json"
LEAST_DOCUMENTS = 20
"""Minimum number of documents in each half; a bootstrap over fewer gives intervals that are too narrow."""
Task = Literal["old", "new"]
Half = Literal["validation", "test"]
TASKS: tuple[Task, ...] = ("old", "new")
HALVES: tuple[Half, ...] = ("validation", "test")


@dataclass(frozen=True)
class Use:
    """A comparison on the test half. number: counted from 1; candidate, champion: content digests of the two models."""

    number: int
    candidate: str
    champion: str


@dataclass(frozen=True)
class Benchmark:
    """A frozen benchmark in `folder`. digest: content digest of the folder."""

    folder: Path
    digest: str

    def file(self, task: Task, half: Half) -> Path:
        return self.folder / _file_name(task, half)

    def read(self, task: Task, half: Half) -> list[Document]:
        with open(self.file(task, half), encoding="utf-8") as file:
            return [Document.from_json(line) for line in file]

    def every_document(self) -> list[Document]:
        """Returns the documents of all tasks and halves, for decontamination."""
        return [document for task in TASKS for half in HALVES for document in self.read(task, half)]

    @property
    def uses(self) -> list[Use]:
        """Uses of the test half so far. Raises `ArtifactError` if the record is damaged."""
        path = self._uses_folder / USES
        if not path.exists():
            return []
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            if plain["benchmark"] != self.digest:
                raise ValueError("it counts the uses of another benchmark")
            return [Use(**one) for one in plain["uses"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ArtifactError(
                f"{path}: is damaged ({error}), so nobody knows how often the test half was used; freeze another one"
            ) from None

    def count_use(self, candidate: str, champion: str, max_uses: int) -> Use:
        """Records a use before its result is known. Comparing the same two models again counts as the same use, since
        the result is the same. Raises `ConfigError` for a new use beyond `max_uses`.
        """
        make_folder(self._uses_folder)
        with lock_folder(self._uses_folder, "this benchmark; wait for it"):
            uses = self.uses
            for use in uses:
                if (use.candidate, use.champion) == (candidate, champion):
                    return use
            # Within the lock: two gates that begin together must not both take the last use.
            if len(uses) >= max_uses:
                raise ConfigError(
                    f"{self.folder}: its test half was used {len(uses)} times, so further results would say little; "
                    "freeze a new benchmark from other texts"
                )
            use = Use(len(uses) + 1, candidate, champion)
            plain = {"benchmark": self.digest, "uses": [asdict(one) for one in [*uses, use]]}
            write_atomic(self._uses_folder / USES, json.dumps(plain, indent=1))
            return use

    @property
    def _uses_folder(self) -> Path:
        """Folder of the record of uses, next to the benchmark's own folder, which never changes."""
        return self.folder.resolve().parent / f"{self.folder.resolve().name}-uses"


def freeze_benchmark(
    old: Sequence[str], new: Sequence[str], folder: Path, data: SourceConfig | None = None
) -> Benchmark:
    """Writes the benchmark of old and new tasks to `folder`, which then never changes.

    data: how the sources are read. Raises `ConfigError` if `folder` already contains a benchmark, and `DataError` for
    too few documents (in total or of one form) or for a question that occurs in both tasks.
    """
    if is_finished(folder):
        raise ConfigError(
            f"{folder}: already contains a benchmark, which never changes; choose another folder for a new one"
        )
    documents = {task: _read(task, sources, data) for task, sources in (("old", old), ("new", new))}
    both = {_key(document) for document in documents["old"]} & {_key(document) for document in documents["new"]}
    if both:
        raise DataError(f"--new: {len(both)} of its questions or texts are in --old, too, such as {min(both)[:80]!r}")
    with write_artifact(folder, kind=KIND, digest="") as draft:
        for task, every in documents.items():
            for half, chosen in zip(HALVES, _halves(every), strict=True):
                if len(chosen) < LEAST_DOCUMENTS:
                    raise DataError(
                        f"--{task}: {len(every)} different documents make halves of less than {LEAST_DOCUMENTS}; give "
                        f"at least {2 * LEAST_DOCUMENTS}"
                    )
                _require_comparable(task, chosen)
                lines = "".join(f"{document.to_json()}\n" for document in chosen)
                write_atomic(draft.path / _file_name(cast(Task, task), half), lines)
                draft.facts[f"{task}/{half}"] = len(chosen)
    return load_benchmark(folder)


def _require_comparable(task: str, documents: Sequence[Document]) -> None:
    """Raises `DataError` if one half has a single document of a form of text: the gate judges each form separately, and
    a single document gives no interval.
    """
    num_spoken = sum(document.kind == "qa" for document in documents)
    for form, count in (("conversation", num_spoken), ("text", len(documents) - num_spoken)):
        if count == 1:
            raise DataError(f"--{task}: one of its halves has a single {form}; give more of them, or none")


def load_benchmark(folder: Path) -> Benchmark:
    """Loads a benchmark. Raises `ArtifactError` if the folder does not contain one or a file was changed."""
    return Benchmark(folder, read_manifest(folder, kind=KIND, verify=True).content_digest)


def _file_name(task: Task, half: Half) -> str:
    return f"{task}-{half}.jsonl"


def _read(task: str, sources: Sequence[str], data: SourceConfig | None) -> list[Document]:
    """Reads held-out documents, keeping one of those with the same question or text."""
    settings: dict[str, Any] = {"sources": tuple(sources), "validation_fraction": 0.0}
    config = SourceConfig(**{**(vars(data) if data else {}), **settings})
    unique: dict[str, Document] = {}
    for document in read_documents(config, report=SourceReport()):
        if not document.is_undesirable:
            plain = document.plain() | {"split": "heldout", "source": task}
            unique.setdefault(_key(document), Document.from_plain(plain))
    return list(unique.values())


def _key(document: Document) -> str:
    return question_key(document) or text_key(document)


def _halves(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Splits documents into halves by the order of their hashes, so that the order of the sources does not matter."""
    ranked = sorted(documents, key=lambda document: hashlib.sha256(_key(document).encode()).digest())
    return ranked[::2], ranked[1::2]


def level_of_use(number: int, alpha: float) -> float:
    """Returns the level of use `number` (from 1); over all uses the levels sum to `alpha`."""
    return alpha / (number * (number + 1))
