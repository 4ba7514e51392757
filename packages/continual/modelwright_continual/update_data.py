"""The texts of an update: new ones, and a sample of old ones to replay, read once and kept as an artifact of the run.

`new.jsonl` and `old.jsonl` are sources of the run, which cleans both; their documents have the sources `new` and `old`,
by which batches are mixed. `heldout.jsonl` contains every text that must not be trained on; documents with the question
of one of these are dropped from both files. The choice of old texts is the concern of `old_texts.py`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from modelwright.core.artifacts import RunDir, is_finished, read_manifest, write_artifact
from modelwright.core.config import ConfigError, DataError, digest, dump
from modelwright.core.progress import Progress
from modelwright.core.texts import redact_text
from modelwright.data.clean.config import CleanConfig
from modelwright.data.document import Document
from modelwright.data.sources.corpora import without_corpora
from modelwright.data.sources.find_files import locate
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import fingerprint
from modelwright_continual.benchmark import Benchmark
from modelwright_continual.caps import USER_FIELD, Caps
from modelwright_continual.heldout import HeldoutTexts
from modelwright_continual.old_texts import (
    ReplaySample,
    content_digests,
    different_texts,
    heldout_texts,
    learned_texts,
    num_bytes,
)
from modelwright_continual.self_replay import SelfReplay
from modelwright_continual.update_files import CAPPED_FILE, HELDOUT_FILE, KIND, NEW, OLD

OWN_TEXTS = "self-replay"
Form = Literal["text", "conversations"]
_PART_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Inputs of an update's texts.

    new: sources of new texts; old: sources of old texts outside of runs; old_runs: the model's chain of runs, whose
    texts are replayed together with `old` and whose held-out texts are left alone; unknown: reason why some old texts
    are not known, "" if all are; own_model: folder of a model that generates the old texts instead of both; replay:
    share of old rows among all training rows; caps: on the new texts of one source, user or
    template; data: how the sources are read.
    """

    new: tuple[str, ...]
    old: tuple[str, ...] = ()
    old_runs: tuple[RunDir, ...] = ()
    unknown: str = ""
    own_model: Path | None = None
    replay: float = 0.05
    seed: int = 1
    caps: Caps = field(default_factory=Caps)
    data: SourceConfig = field(default_factory=SourceConfig)

    def __post_init__(self) -> None:
        if not self.new:
            raise ConfigError("continual: name the files with new texts after the model")
        if not 0.0 <= self.replay < 1.0:
            raise ConfigError(f"--replay: must be at least 0 and below 1, got {self.replay:g}; 0.05 is usual")
        if self.old and self.own_model:
            raise ConfigError("--self-replay: the model writes the old texts; leave --old out, or this one")
        if self.replay and self.unknown and not (self.old or self.own_model):
            raise ConfigError(
                f"--old: {self.unknown}; name files to replay, let the model write them with --self-replay, or set "
                "--replay 0"
            )


@dataclass(frozen=True)
class UpdateData:
    """The artifact with an update's texts. forms: forms of text (text, conversations) that the new texts have; facts:
    counts, drops and digests.
    """

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
    """Reads the texts into `folder`, or returns the result of an earlier call with the same request.

    Texts with the question of a held-out one are dropped and counted; passages are left to decontamination. Raises
    `ConfigError` if `folder` contains the texts of another update, and `DataError` if no new text or no old one is
    left.
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
    heldout = different_texts(chain(benchmark.every_document(), *map(heldout_texts, request.old_runs)))
    known = HeldoutTexts.of(heldout)
    dropped: dict[str, Counter[str]] = {NEW: Counter(), OLD: Counter()}
    new = list(_screened(_read(request.new, request), known, dropped[NEW]))
    if not new:
        raise DataError(f"{', '.join(request.new)}: no new text is left ({_counts(dropped[NEW])})")
    new, beyond, capped = request.caps.apply(new, request.seed)
    screened = partial(_screened, heldout=known, dropped=dropped[OLD])
    # After the caps, because the share of replay refers to the texts that remain.
    old = _replayed(request, new, screened, folder.with_name(OWN_TEXTS), progress)
    forms = _forms(new)
    with write_artifact(folder, kind=KIND, digest=identity) as draft:
        _write(draft.path / f"{NEW}.jsonl", map(_as_new, new))
        _write(draft.path / f"{OLD}.jsonl", (_as_old(document, number) for number, document in enumerate(old)))
        _write(draft.path / HELDOUT_FILE, heldout)
        _write(draft.path / CAPPED_FILE, beyond)
        draft.facts |= {
            "forms": forms,
            "new": len(new),
            "old": len(old),
            "dropped": dropped[NEW],
            "capped": capped,
            "old_dropped": dropped[OLD],
            "replay": request.replay,
            "sources": describe_sources(request.new),
            "old_sources": describe_sources(request.old),
            "own_texts": _own_identity(request),
            "old_runs": [str(run.path.resolve()) for run in request.old_runs],
            "benchmark": benchmark.digest,
        }
    progress.end()
    for name, counts in dropped.items():
        if counts:
            progress.note(f"update: {_counts(counts)} left out of the {name} texts")
    for name, one in capped.items():
        progress.note(
            f"update: {one['capped']:,} new texts left out, because each {name} may bring {one['limit']:,} "
            f"(--{name}-cap); {one['groups']:,} brought more"
        )
    # The folder is finished now, so this returns the same as every later call.
    return prepare_data(request, benchmark, folder, progress)


def describe_sources(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Returns name, size and SHA-256 of every file; for a source that is not a file, its name only."""
    named = without_corpora(sources)
    described: list[dict[str, Any]] = [{"name": word} for word in sources if word not in named]
    for file in locate(named, lambda reason, name: None):
        content = hashlib.sha256()
        with file.filesystem.open(file.path, "rb") as opened:
            while part := opened.read(_PART_BYTES):
                content.update(cast(bytes, part))
        described.append({"name": redact_text(file.name), "sha256": content.hexdigest()})
    return described


def _identity(request: DataRequest, benchmark: Benchmark) -> str:
    named = replace(request.data, sources=(*request.new, *request.old))
    plain = {"new": request.new, "old": request.old, "replay": request.replay, "seed": request.seed}
    plain["caps"] = vars(request.caps)
    plain["old_runs"] = content_digests(request.old_runs)
    read = {"data": dump(request.data), "files": fingerprint(named, CleanConfig()), "benchmark": benchmark.digest}
    own = {"own": own_texts} if (own_texts := _own_identity(request)) else {}
    return digest(plain | read | own)


def _own_identity(request: DataRequest) -> str:
    """Digest of everything that determines the texts that the model generates; "" if it generates none."""
    return SelfReplay(request.own_model, Path(), request.seed).identity if request.own_model else ""


def _read(sources: Sequence[str], request: DataRequest) -> Iterable[Document]:
    keep_fields = tuple(dict.fromkeys([*request.data.keep_fields, USER_FIELD]))  # the caps need it
    config = replace(request.data, sources=tuple(sources), validation_fraction=0.0, keep_fields=keep_fields)
    return read_documents(config, report=SourceReport(), leave_open=True)


def _screened(documents: Iterable[Document], heldout: HeldoutTexts, dropped: Counter[str]) -> Iterator[Document]:
    """Yields the documents that may be trained on; the others are counted by reason."""
    for document in documents:
        reason = heldout.question_of(document) or ("bad answer" if document.is_undesirable else "")
        if reason:
            dropped[reason] += 1
        else:
            yield document


def _replayed(
    request: DataRequest,
    new: Sequence[Document],
    screened: Callable[[Iterable[Document]], Iterator[Document]],
    folder: Path,
    progress: Progress,
) -> list[Document]:
    """Returns a random sample of the old documents: of each form, as many bytes as its share requires, or all if there
    are fewer. screened: drops documents that must not be trained on; folder: where generated texts are kept.
    """
    if not request.replay:
        return []
    # With share r of replay, old rows are r / (1 - r) of the new ones.
    share = request.replay / (1.0 - request.replay)
    wanted = {form: share * sum(num_bytes(one) for one in new if _form(one) == form) for form in _forms(new)}
    if request.own_model:
        own = SelfReplay(request.own_model, folder, request.seed)
        return list(screened(chain.from_iterable(own.texts(form, wanted[form], progress) for form in wanted)))
    samples = {form: ReplaySample(request.seed, wanted[form]) for form in wanted}
    for document in screened(_old_documents(request)):
        if (form := _form(document)) in samples:
            samples[form].add(document)
    for form, sample in samples.items():
        if not sample.num_texts:
            raise DataError(f"--old: lacks {form} to replay with the new {form}; add some, or set --replay 0")
        if sample.num_bytes < wanted[form]:
            times = wanted[form] / sample.num_bytes
            progress.note(f"replay: all {sample.num_texts:,} old documents ({form}) are read about {times:.1f} times")
    return [document for sample in samples.values() for document in sample.texts()]


def _old_documents(request: DataRequest) -> Iterator[Document]:
    """Yields the texts of the model's runs, then those of the request's sources."""
    yield from chain.from_iterable(map(learned_texts, request.old_runs))
    if request.old:
        yield from _read(request.old, request)


def _forms(documents: Iterable[Document]) -> tuple[Form, ...]:
    return tuple(sorted({_form(document) for document in documents}))


def _form(document: Document) -> Form:
    return "conversations" if document.kind == "qa" else "text"


def _as_new(document: Document) -> Document:
    """Marks a document as new. It keeps its split, since the run holds some new documents out."""
    return replace(document, id=f"{NEW}/{document.id}", source=NEW)


def _as_old(document: Document, number: int) -> Document:
    """Marks a document as old, for training only. number: distinguishes documents of the same id from
    different runs.
    """
    return replace(document, id=f"{OLD}/{number}/{document.id}", source=OLD, split="train")


def _write(path: Path, documents: Iterable[Document]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(document.to_json() + "\n")


def _counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} with a {reason}" for reason, count in dropped.items()) or "there was none"
