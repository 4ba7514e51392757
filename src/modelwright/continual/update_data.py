"""The texts of an update: new ones, and a sample of old ones to replay, read once and kept as an artifact of the run.

`new.jsonl` and `old.jsonl` are sources of the run, which cleans both; their documents have the sources `new` and `old`,
by which batches are mixed. `heldout.jsonl` has every text that the run must not learn from.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from modelwright.continual.benchmark import Benchmark
from modelwright.continual.heldout import HeldoutTexts
from modelwright.continual.self_replay import SelfReplay
from modelwright.core.artifacts import is_finished, read_manifest, write_artifact
from modelwright.core.config import digest, dump
from modelwright.core.errors import ArtifactError, ConfigError, DataError
from modelwright.core.progress import Progress
from modelwright.core.redact import redact_text
from modelwright.core.rundir import RunDir
from modelwright.core.seeds import derive_seed
from modelwright.data.clean import read_kept
from modelwright.data.clean_config import CleanConfig
from modelwright.data.document import Document
from modelwright.data.find_files import locate
from modelwright.data.own_answers import is_own
from modelwright.data.sources import WORDS, SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import fingerprint
from modelwright.pipeline.stages.clean import CLEAN

KIND = "update-data"
OLD, NEW = "old", "new"
"""The sources of an update's documents."""
OWN_TEXTS = "self-replay"
HELDOUT_FILE = "heldout.jsonl"
Form = Literal["text", "conversations"]
_PART_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What an update learns from.

    new: sources of new texts; old: sources of old ones, or the one run whose cleaned texts are meant; own_model: the
    folder of a model that writes the old ones itself, in the place of both; replay: share of old rows among all that
    are trained on; data: how the sources are read.
    """

    new: tuple[str, ...]
    old: tuple[str, ...] = ()
    old_run: RunDir | None = None
    own_model: Path | None = None
    replay: float = 0.05
    seed: int = 1
    data: SourceConfig = field(default_factory=SourceConfig)

    def __post_init__(self) -> None:
        if not self.new:
            raise ConfigError("continual: name the files with new texts after the model")
        if not 0.0 <= self.replay < 1.0:
            raise ConfigError(f"--replay: must be at least 0 and below 1, got {self.replay:g}; 0.05 is usual")
        if self.old and self.own_model:
            raise ConfigError("--self-replay: the model writes the old texts; leave --old out, or this one")
        if self.replay and not (self.old or self.old_run or self.own_model):
            raise ConfigError(
                "--old: the model is no run, so its texts are not known; name files to replay, let the model write "
                "them with --self-replay, or set --replay 0"
            )


@dataclass(frozen=True)
class UpdateData:
    """The artifact. forms: what of text and conversations there is to learn; facts: counts, drops and digests."""

    folder: Path
    forms: tuple[Form, ...]
    facts: Mapping[str, Any]

    @property
    def sources(self) -> tuple[str, ...]:
        names = [name for name in (NEW, OLD) if self._file(name).stat().st_size]
        return tuple(str(self._file(name).resolve()) for name in names)

    @property
    def heldout(self) -> str:
        return str((self.folder / HELDOUT_FILE).resolve())

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def prepare_data(request: DataRequest, benchmark: Benchmark, folder: Path, progress: Progress) -> UpdateData:
    """Read the texts into `folder`, or take what an earlier call with the same request has left there.

    New texts with the question of a held-out one are dropped and counted; passages are left to decontamination. Raises
    `ConfigError` if `folder` has the texts of another update, `DataError` if no new text or no old one is left.
    """
    identity = _identity(request, benchmark)
    if is_finished(folder):
        manifest = read_manifest(folder, kind=KIND, verify=True)
        if manifest.digest != identity:
            raise ConfigError(
                f"{folder.parent}: contains an update from other texts or with another share of replay; choose another "
                "--run-dir"
            )
        return UpdateData(folder, tuple(manifest.facts["forms"]), manifest.facts)
    progress.begin("update texts", 0, "documents")
    heldout = [*benchmark.every_document(), *_heldout_of(request.old_run)]
    new, dropped = _screened(_read(request.new, request), HeldoutTexts.of(heldout))
    if not new:
        raise DataError(f"{', '.join(request.new)}: no new text is left ({_counts(dropped)})")
    old = _replayed(request, new, folder.with_name(OWN_TEXTS), progress)
    forms = tuple(sorted({_form(document) for document in new}))
    with write_artifact(folder, kind=KIND, digest=identity) as draft:
        for name, documents in ((NEW, new), (OLD, old)):
            _write(draft.path / f"{name}.jsonl", (_renamed(document, name) for document in documents))
        _write(draft.path / HELDOUT_FILE, heldout)
        draft.facts |= {
            "forms": forms,
            "new": len(new),
            "old": len(old),
            "dropped": dropped,
            "replay": request.replay,
            "sources": describe_sources(request.new),
            "old_sources": describe_sources(request.old),
            "own_texts": _own_identity(request),
            "old_run": str(request.old_run.path.resolve()) if request.old_run else "",
            "benchmark": benchmark.digest,
        }
    progress.end()
    if dropped:
        progress.note(f"update: {_counts(dropped)} left out of the new texts")
    return prepare_data(request, benchmark, folder, progress)


def describe_sources(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every file; the name alone of a source that is none."""
    described: list[dict[str, Any]] = [{"name": word} for word in sources if word in WORDS]
    files = locate(tuple(source for source in sources if source not in WORDS), lambda reason, name: None)
    for file in files:
        content = hashlib.sha256()
        with file.filesystem.open(file.path, "rb") as opened:
            while part := opened.read(_PART_BYTES):
                content.update(cast(bytes, part))
        described.append({"name": redact_text(file.name), "sha256": content.hexdigest()})
    return described


def _identity(request: DataRequest, benchmark: Benchmark) -> str:
    named = replace(request.data, sources=(*request.new, *request.old))
    old_run = read_manifest(request.old_run.stage(CLEAN.name).artifact).content_digest if request.old_run else ""
    plain = {"new": request.new, "old": request.old, "replay": request.replay, "seed": request.seed, "old_run": old_run}
    read = {"data": dump(request.data), "files": fingerprint(named, CleanConfig()), "benchmark": benchmark.digest}
    own = {"own": own_texts} if (own_texts := _own_identity(request)) else {}
    return digest(plain | read | own)


def _own_identity(request: DataRequest) -> str:
    """What decides the texts that the model writes itself; "" if it writes none."""
    return SelfReplay(request.own_model, Path(), request.seed).identity if request.own_model else ""


def _read(sources: Sequence[str], request: DataRequest) -> Iterable[Document]:
    config = replace(request.data, sources=tuple(sources), validation_fraction=0.0)
    return read_documents(config, report=SourceReport(), leave_open=True)


def _heldout_of(run: RunDir | None) -> list[Document]:
    return list(read_kept(run.stage(CLEAN.name).artifact, split="heldout")) if run else []


def _screened(documents: Iterable[Document], heldout: HeldoutTexts) -> tuple[list[Document], dict[str, int]]:
    kept: list[Document] = []
    dropped: dict[str, int] = {}
    for document in documents:
        reason = heldout.question_of(document) or ("bad answer" if document.is_undesirable else "")
        if reason:
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            kept.append(document)
    return kept, dropped


def _replayed(request: DataRequest, new: Sequence[Document], folder: Path, progress: Progress) -> list[Document]:
    """A random sample of the old documents, of each form as many bytes as its share asks for, or all that there are.
    folder: where texts are kept that the model writes itself.
    """
    if not request.replay:
        return []
    every = [] if request.own_model else _old_documents(request)
    ranked = sorted(every, key=lambda document: derive_seed(request.seed, "replay", document.id, document.text))
    chosen: list[Document] = []
    for form in sorted({_form(document) for document in new}):
        wanted = request.replay / (1.0 - request.replay) * sum(_size(one) for one in new if _form(one) == form)
        if request.own_model:
            chosen += SelfReplay(request.own_model, folder, request.seed).texts(form, wanted, progress)
            continue
        taken = 0
        own = [document for document in ranked if _form(document) == form]
        if not own:
            raise DataError(f"--old: has no {form} to replay beside the new {form}; add some, or set --replay 0")
        for document in own:
            if taken >= wanted:
                break
            chosen.append(document)
            taken += _size(document)
        if taken < wanted:
            progress.note(f"replay: all {len(own):,} old documents ({form}) are read about {wanted / taken:.1f} times")
    return chosen


def _old_documents(request: DataRequest) -> list[Document]:
    if request.old:
        return [document for document in _read(request.old, request) if not document.is_undesirable]
    assert request.old_run is not None
    try:
        kept = read_kept(request.old_run.stage(CLEAN.name).artifact, split="train")
        return [document for document in kept if not is_own(document.meta)]
    except ArtifactError as error:
        raise ConfigError(f"--old: {error}; name files to replay") from None


def _form(document: Document) -> Form:
    return "conversations" if document.kind == "qa" else "text"


def _size(document: Document) -> int:
    return len(document.text.encode("utf-8"))


def _renamed(document: Document, name: str) -> Document:
    """Old documents are all trained on; the run holds some of the new ones out."""
    split = "train" if name == OLD else document.split
    return replace(document, id=f"{name}/{document.id}", source=name, split=split)


def _write(path: Path, documents: Iterable[Document]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(document.to_json() + "\n")


def _counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} with a {reason}" for reason, count in dropped.items()) or "there was none"
