"""Reads the user's sources as documents with a kind and a split.

Prose comes from text files, web pages, web archives and records with a text field, code from source files by their
extension, questions and answers from records in the forms of `forms.py`, images with captions from `data/images`, and
corpora (`stdlib`, ...) from `corpora.py`. Unreadable records raise a `DataError` with file and line, or are left out
and counted. Only one document at a time is in memory, or one `.json` file. See `data/clean` for cleaning.

Records may be documents of cleaning, or answers that Modelwright gave. A model that learns from its own answers by
accident gets worse with each generation (Shumailov et al. 2024, AI models collapse when trained on recursively
generated data). A JSON Schema (https://json-schema.org) may say what every record must have.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import pyarrow as pa
from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from modelwright.core import hub
from modelwright.core.config import ConfigError, DataError, constant
from modelwright.data.document import KINDS, SPLITS, WEIGHT, Document, Kind, Split, Unsplit, with_splits
from modelwright.data.images.decode import KEY, is_stored_image
from modelwright.data.images.read import (
    ARCHIVE_EXTENSIONS,
    CAPTION_FIELDS,
    IMAGE_FIELDS,
    LABEL_FIELD,
    encodable,
    is_image_record,
    read_archive,
    read_image,
    read_image_record,
)
from modelwright.data.sources import readers
from modelwright.data.sources.corpora import BUILTIN, corpus_words, find_corpus, without_corpora
from modelwright.data.sources.fields import SIGNIFICANT, TURN, Fields, FieldUse, printable, use_of
from modelwright.data.sources.find_files import (
    CODE_EXTENSIONS,
    DOCUMENT_EXTENSIONS,
    LOOSE_EXTENSIONS,
    MARKUP_EXTENSIONS,
    PAIRED_EXTENSIONS,
    PROSE_EXTENSIONS,
    locate,
)
from modelwright.data.sources.forms import (
    FIELDS,
    FORMS,
    PAIRED,
    PROMPT_ONLY,
    PairError,
    conversation_meta,
    is_conversation,
    num_hints,
    read_record,
    record_type,
    type_of_record,
)
from modelwright.data.sources.office import is_readable, read_document
from modelwright.data.workers import InProcess, ShardEngine

AUTHOR_FIELD, ANSWER_FIELD = "answer_by", "answer"
OWN_AUTHOR = "modelwright"

REMEDY = (
    "learn from its prompts with --data.record_type text --data.text_field prompt, or from the answers, too, with "
    "--data.own_answers train"
)
REMEDY_TEXT = "leave it out, or learn from it with --data.own_answers train"


def with_meta(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a document's record with `meta` as an object where a table has it as text, and without an open split."""
    meta = record.get("meta")
    if not isinstance(meta, str) or record.get("kind") not in KINDS:
        return record
    try:
        fields: Any = json.loads(meta)
    except ValueError:
        return record
    dropped = "split" if record.get("split") in (None, "open") else ""
    return {name: value for name, value in {**record, "meta": fields}.items() if name != dropped}


def is_document(record: Mapping[str, Any]) -> bool:
    """Returns True for a document that cleaning wrote, with all of its fields, except for an open split."""
    is_complete = all(isinstance(record.get(name), str) for name in ("id", "text", "source"))
    if not is_complete or not isinstance(record.get("meta"), dict):
        return False
    if record.get("kind") not in KINDS or ("split" in record and record["split"] not in SPLITS):
        return False
    meta = record["meta"]
    if not has_types_of_document(meta):
        return False
    if record["kind"] == "image":
        return is_stored_image(meta.get(KEY))
    return record["kind"] != "qa" or "messages" in meta or ("question" in meta and "answer" in meta)


def has_types_of_document(meta: Mapping[str, Any]) -> bool:
    """Returns True if the fields of `meta` that `Document` reads have the right types."""
    if not all(isinstance(meta.get(name, ""), str) for name in ("title", "summary", "question", "answer")):
        return False
    if not isinstance(meta.get("desirable", True), bool) or type(meta.get(WEIGHT, 1.0)) not in (int, float):
        return False
    if not isinstance(meta.get("chat_template_kwargs", {}), dict) or not isinstance(meta.get("tools", []), list):
        return False
    for name in ("messages", "rejected"):
        turns = meta.get(name)
        if name in meta and not (isinstance(turns, list) and turns and all(map(_is_turn, cast(list[Any], turns)))):
            return False
    return True


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
        return False
    calls = turn.get("tool_calls", [])
    if not isinstance(turn.get("reasoning_content", ""), str) or not isinstance(turn.get("train", True), bool):
        return False
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(function, dict) and "arguments" in function for function in functions)


def is_own(record: Mapping[str, Any]) -> bool:
    """Returns True if Modelwright wrote the answer of a record."""
    return record.get(AUTHOR_FIELD) == OWN_AUTHOR


class RecordSchema:
    """A JSON Schema read from a file."""

    def __init__(self, schema: Any, path: str) -> None:
        """path: the file's path, for errors. Raises `jsonschema.SchemaError` for a schema that is not valid."""
        self._path = path
        kind = validator_for(schema)
        kind.check_schema(schema)
        self._validator = kind(schema)

    @staticmethod
    @cache
    def read(path: str) -> "RecordSchema":
        """Reads the schema of a file. Raises `ConfigError` with the name of the file."""
        try:
            with open(path, encoding="utf-8") as file:
                return RecordSchema(json.load(file), path)
        except OSError as error:
            raise ConfigError(f"schema: {path}: cannot be read ({error.strerror}); give a JSON Schema file") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"schema: {path}: is not JSON ({error}); give a JSON Schema file") from None
        except SchemaError as error:
            raise ConfigError(f"schema: {path}: is not a JSON Schema ({error.message}); correct it") from None

    def problem(self, record: Mapping[str, Any]) -> str:
        """Returns the part of the schema that a record violates, "" for a valid one, without the record's values.

        Raises `ConfigError` for a schema with references or patterns that cannot be resolved.
        """
        try:
            error = best_match(self._validator.iter_errors(dict(record)))
        except (Unresolvable, re.error) as error:
            text = f"schema: {self._path}: cannot be applied ({error}); correct its references and patterns"
            raise ConfigError(text) from None
        if error is None:
            return ""
        field = ".".join(map(str, error.absolute_path)) or "the record"
        rule = f"{error.validator}: {error.validator_value!r}"
        # A rule may be a list of thousands of values.
        return f"{field} violates {rule[:200]}"


DEFAULT_TEXT_FIELD = "text"
_IN_PROCESS = InProcess()
MAX_EXAMPLES = 5
ENOUGH_HINTS = 2
"""Minimum number of fields named like a question or an answer in the records of a file that counts as text."""
CARRIED_FIELDS = ("id", "url", "language", "score")
"""Fields of a record that its document always keeps in `meta`."""
_HELDOUT_NAMES = ("test", "validation", "valid", "dev", "heldout")
_DOCUMENT_FIELDS = tuple(entry.name for entry in fields(Document))


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Sources of the text; docs/data.md lists file formats and record types."""

    sources: tuple[str, ...] = (BUILTIN,)
    """Files, directories, globs, fsspec URLs, `stdlib` for the source of Python's standard library and its docs with
    those of torch and NumPy, `arithmetic` for generated problems with answers, `sentence_pairs` for preference pairs
    made of those docs, `digits` for handwritten digits with captions, or a corpus of another package, such as `tools`
    for conversations with calls (extra `agents`)."""
    text_field: str = DEFAULT_TEXT_FIELD
    """Field of a record with its text. A name other than `text` is used even if the record is a conversation."""
    validation_fraction: float = 0.05
    """Fraction of documents held out for validation, by hash of the text. `stdlib` brings its own split, by module."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of the records' own fields by the expected names: `{question: q, answer: a}`."""
    ignore: tuple[str, ...] = ()
    """Fields of records, and of their turns, that are meant to be ignored. A field that would change what is learned
    and that no reader understands is an error unless it is named here."""
    record_type: Literal[
        "auto", "text", "messages", "sharegpt", "question_answer", "multiple_choice", "instruction",
        "prompt_completion", "prompt_only", "preference", "openai_preference", "unpaired_preference",
    ] = "auto"  # fmt: skip
    """Type of all records; `auto` recognizes it from the fields of each. docs/data.md lists the fields of each type."""
    keep_fields: tuple[str, ...] = ()
    """Further fields of a record that its document keeps, such as a score."""
    schema: str = ""
    """JSON Schema file that every record must satisfy, in addition to the fields of its type."""
    own_answers: Literal["refuse", "train"] = "refuse"
    """`refuse` treats a record with an answer by a model of Modelwright (`answer_by`: modelwright, in exports of the
    request log) as a bad one, unless only its prompt is read; `train` learns from such answers, too."""
    on_bad_record: Literal["error", "skip"] = "error"
    """`error` stops at the first unreadable record; `skip` drops and counts it."""
    learns: bool = constant(True)
    """False where records are only compared with, as evaluation sets are: fields that say what is learned may be left
    over."""
    max_document_chars: int = constant(10_000)
    """Longer text files are split into several documents at blank lines."""
    max_record_bytes: int = 16 * 2**20
    """Maximum bytes of a line, record, web page or source file; a longer one is a bad record."""
    stdlib_fraction: float = 1.0
    """Fraction of the modules of `stdlib`, for small runs."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(f"sources: is empty; give files or directories, or {BUILTIN!r}")
        if not 0 <= self.validation_fraction <= 0.5:
            raise ConfigError(f"validation_fraction: {self.validation_fraction} is not between 0 and 0.5")
        if not 0 < self.stdlib_fraction <= 1:
            raise ConfigError(f"stdlib_fraction: {self.stdlib_fraction} is not in (0, 1]")
        if self.max_document_chars < 1:
            raise ConfigError(f"max_document_chars: {self.max_document_chars} is not positive")
        if self.max_record_bytes < 1:
            raise ConfigError(f"max_record_bytes: {self.max_record_bytes} is not positive")


HALF_PAIR_REMEDY = "write the whole character, or remove it"


@dataclass(kw_only=True)
class SourceReport:
    """Counts of a read. `documents` and `bytes` (UTF-8) by kind; `skipped` records, and files and directories that were
    `passed_over`, by reason, with the first few `examples` of each reason.
    """

    num_files: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    """Documents whose text is not that of the file, by what was done to it."""
    record_types: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    field_use: dict[str, FieldUse] = field(default_factory=dict)
    """Which fields of the records were used, by file."""
    on_skip: Callable[[str, str, str], None] | None = field(default=None, repr=False, compare=False)
    """Called with the reason, the place and the problem of every skipped record."""
    first_problem: str = field(default="", repr=False, compare=False)
    """Place and problem of the first skipped record that was not just empty."""

    def facts(self) -> dict[str, Any]:
        """Returns the counts as plain data."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.compare}
        return plain | {"field_use": {name: use.facts() for name, use in self.field_use.items()}}

    @property
    def all_fields(self) -> FieldUse:
        """The use of fields in all files together."""
        total = FieldUse()
        for use in self.field_use.values():
            total.merge(use)
        return total

    @property
    def num_documents(self) -> int:
        return sum(self.documents.values())

    def add(self, document: Document) -> None:
        self.documents[document.kind] = self.documents.get(document.kind, 0) + 1
        size = len(document.text.encode("utf-8", "replace"))
        self.bytes[document.kind] = self.bytes.get(document.kind, 0) + size

    def skip(self, reason: str, where: str, problem: str = "", way_out: str = "") -> None:
        """Counts a skipped record."""
        self._count(self.skipped, reason, where)
        remedy = f"; {way_out}" if way_out else ""
        self.first_problem = self.first_problem or (f"{where}: {problem}{remedy}" if problem else "")
        if self.on_skip is not None:
            self.on_skip(reason, where, problem or reason)

    def change(self, what: str, where: str) -> None:
        """Counts a document whose text was changed in reading."""
        self._count(self.changed, what, where)

    def pass_over(self, reason: str, name: str) -> None:
        """Counts a file or directory that is not read."""
        self._count(self.passed_over, reason, name)

    def summary(self) -> list[str]:
        """Returns lines about the fields of records, unread files and unread records, each only if there were some."""
        lines = [line] if (line := self.all_fields.line()) else []
        if self.passed_over:
            lines.append(f"not read: {self._reasons(self.passed_over)}")
        if self.changed:
            lines.append(f"changed: {self._reasons(self.changed)}")
        if self.skipped:
            num_records = sum(self.skipped.values())
            what = f"{num_records:,} records could not be read and were left out"
            what = what if num_records > 1 else "1 record could not be read and was left out"
            lines.append(f"{what}: {self._reasons(self.skipped)}")
        return lines

    def _count(self, counters: dict[str, int], reason: str, where: str) -> None:
        counters[reason] = counters.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(where)

    def _reasons(self, counters: Mapping[str, int]) -> str:
        return ", ".join(
            f"{count:,} {reason} ({self.examples[reason][0]}{', ...' * (count > 1)})"
            for reason, count in counters.items()
        )


def read_documents(
    config: SourceConfig,
    *,
    report: SourceReport,
    leave_open: bool = False,
    sample: int = 0,
    engine: ShardEngine = _IN_PROCESS,
) -> Iterator[Document]:
    """Yields all documents of the sources, in a fixed order, and adds them to `report`.

    leave_open: leaves the split open unless the record or `validation_fraction` decides it; otherwise it is "train".
    sample: if not 0, reads about this many documents, the first ones of every file, or of every n-th file.
    engine: reads the modules of `stdlib`, with the same documents and order. Files are read in this process, because
    sending their documents to it takes longer than reading them.

    Raises `DataError`, with file and line where known, for a source that is missing or of an unsupported format, for an
    unreadable record (unless `on_bad_record` is "skip") and, at the end, for an empty corpus.
    """
    rest: Split = "open" if leave_open else "train"
    for document in with_splits(_read(config, report, sample, engine), config.validation_fraction, rest):
        report.add(document)
        yield document
    if not sample:
        _check_names(config, report)
    if not report.num_documents:
        left_out = {**report.skipped, **report.passed_over}
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        shown = ", ".join(config.sources)
        if bad := sum(report.skipped.values()) - report.skipped.get("empty text", 0):
            first = report.first_problem or "--data.on_bad_record error shows the problem"
            raise DataError(f"{shown}: none of the records could be read ({reasons}); the first of the {bad}: {first}")
        text = f"{shown}: the corpus is empty ({reasons or 'no records'})"
        raise DataError(f"{text}; give files that contain text with --data.sources")


def _check_names(config: SourceConfig, report: SourceReport) -> None:
    """Raises `DataError` for a field that the settings name and no record has."""
    present = report.all_fields.present
    given = [*(("ignore", name) for name in config.ignore), *(("fields", name) for name in config.fields.values())]
    for setting, name in given:
        if report.num_documents and not any(one.removeprefix(TURN) == name for one in present):
            known = ", ".join(map(printable, list(present)[:20])) or "none"
            text = f"data.{setting}: no record has a value in the field {name!r} (their fields: {known})"
            raise DataError(f"{text}; correct the name or leave it out")


def _read(config: SourceConfig, report: SourceReport, sample: int, engine: ShardEngine) -> Iterator[Document | Unsplit]:
    # In the order of the list of corpora, so that the order of the sources does not matter.
    for word in corpus_words():
        if word in config.sources:
            documents = find_corpus(word).read(fraction=config.stdlib_fraction, skip=report.pass_over, engine=engine)
            yield from islice(documents, sample or None)
    files = locate(without_corpora(config.sources), report.pass_over)
    if not sample:
        for file in files:
            yield from _read_file(file, config, report)
        return
    listed = list(files)
    most = -(-sample // max(1, len(listed)))
    for file in listed[:: max(1, len(listed) // sample)]:
        yield from islice(_read_file(file, config, report), most)


def _read_file(file: readers.File, config: SourceConfig, report: SourceReport) -> Iterator[Document | Unsplit]:
    def complain(reason: str, where: str, problem: str, way_out: str) -> None:
        if config.on_bad_record == "error":
            leave_out = "pass --data.on_bad_record skip to leave such records out and count them"
            raise DataError(f"{where}: {problem}; {way_out}, or {leave_out}")
        report.skip(reason, where, problem, way_out)

    report.num_files += 1
    if not is_readable(file, report.pass_over):
        return
    limit = readers.Limit(config.max_record_bytes, "raise --data.max_record_bytes")
    if file.extension in PROSE_EXTENSIONS + MARKUP_EXTENSIONS + CODE_EXTENSIONS:
        is_code = file.extension in CODE_EXTENSIONS
        # Source code is never cut: half a function is not code.
        if is_code:
            texts = readers.read_whole(file, complain, limit)
        elif file.extension in MARKUP_EXTENSIONS:
            texts = readers.read_html(file, complain, limit, config.max_document_chars)
        else:
            texts = readers.read_sections(file, complain, limit, config.max_document_chars)
        for where, text in texts:
            if text.strip():
                kind: Kind = "code" if is_code else "prose"
                yield Unsplit(Document(id=where, text=text, kind=kind, split="open", source=file.name))
            else:
                report.skip("empty text", where)
        return
    if file.extension in DOCUMENT_EXTENSIONS:
        for where, text in read_document(file, complain, report.skip, config.max_document_chars):
            if text.strip():
                yield Unsplit(Document(id=where, text=text, kind="prose", split="open", source=file.name))
        return
    if file.extension in PAIRED_EXTENSIONS:
        read = read_archive if file.extension in ARCHIVE_EXTENSIONS else read_image
        yield from map(Unsplit, read(file, complain))
        return
    # A Hugging Face dataset names its splits: `.../test/data-00000.arrow` is held out.
    is_heldout = file.extension == ".arrow" and PurePosixPath(file.path).parent.name in _HELDOUT_NAMES
    is_heldout |= not file.is_named and hub.is_heldout(file.path)
    given: Split | None = "heldout" if is_heldout else None
    schema = RecordSchema.read(config.schema) if config.schema else None
    unread = list[str]()
    use = use_of(report.field_use, file.name)
    for where, record in _records(file, config, report, complain, limit, unread):
        try:
            fields = _fields(record, config, file)
        except ValueError as error:
            complain("bad conversation", where, str(error), "correct the record or the registry")
            continue
        if schema is not None and (problem := schema.problem(fields.plain)):
            complain("violates the schema", where, problem, f"correct it or change {config.schema}")
            continue
        if is_image_record(fields.plain):
            found = list(read_image_record(where, fields, file, complain))
            if config.learns and found and found[0].has_turns and (refused := fields.refusal()):
                complain(refused[0], where, *refused[1:])
                continue
            use.add(fields, unread, is_conversation=any(one.has_turns for one in found))
            yield from (replace(one, split=given) if given else Unsplit(one) for one in found)
            continue
        result = _document(where, fields, file.name, config, report, complain)
        if result is None:
            continue
        document = result.document if isinstance(result, Unsplit) else result
        registry = file.entry.registry if file.entry else ""
        if config.learns and document.kind == "qa" and (refused := fields.refusal(registry)):
            complain(refused[0], where, *refused[1:])
            continue
        if file.entry is not None and file.entry.weight != 1:
            weighted = replace(document, meta={**document.meta, WEIGHT: file.entry.weight})
            result = Unsplit(weighted) if isinstance(result, Unsplit) else weighted
        use.add(fields, unread, is_conversation=document.kind == "qa")
        if len(document.text) > config.max_record_bytes:  # a cell of a table, or a page of a web archive
            complain("record too long", where, *limit.record_problem())
            continue
        yield replace(document, split=given) if given and isinstance(result, Unsplit) else result
    if config.learns and (problem := use.binary(config.ignore)):
        raise DataError(f"{file.name}: {problem}")


def _fields(record: Mapping[str, Any], config: SourceConfig, file: readers.File) -> Fields:
    """Returns a record with its fields under the expected names. Raises `ValueError` for one unlike its registry says.

    All values are taken before any is set, so that two fields may swap their names. What stood under a name that
    another field takes is left over.
    """
    if file.entry is not None:
        return file.entry.fields(record, ignored=config.ignore)
    mapping = {name: own for name, own in config.fields.items() if own in record and own not in config.ignore}
    if not mapping:
        return Fields(with_meta(record), ignored=config.ignore)
    moved = set(mapping.values())
    rest = {name: record[name] for name in mapping if name in record and name not in moved}
    kept = {name: value for name, value in record.items() if name not in moved}
    return Fields(
        {**kept, **{name: record[own] for name, own in mapping.items()}},
        names=mapping, rest=rest, ignored=config.ignore, original=record,
    )  # fmt: skip


def _records(
    file: readers.File, config: SourceConfig, report: SourceReport, complain: readers.Complaint, limit: readers.Limit,
    unread: list[str],
) -> Iterator[tuple[str, readers.Record]]:  # fmt: skip
    """Yields the records of a file. unread: receives the columns of a table that are left out."""

    def choose(schema: pa.Schema) -> list[str]:
        names = schema.names
        if config.schema or file.entry is not None:  # either may be about any field
            return list(names)
        known = {
            config.text_field, *CARRIED_FIELDS, AUTHOR_FIELD, *config.keep_fields, *FIELDS, *IMAGE_FIELDS,
            *CAPTION_FIELDS, LABEL_FIELD, *_DOCUMENT_FIELDS, *config.fields.values(), *SIGNIFICANT, *config.ignore,
            # Booleans, and integers that may be all 0 or 1, may say what should be learned.
            *(one.name for one in schema if pa.types.is_boolean(one.type) or pa.types.is_integer(one.type)),
        }  # fmt: skip
        mapped = {*names, *(name for name, own in config.fields.items() if own in names)}
        is_known = config.text_field in mapped or record_type(mapped)
        chosen = [name for name in names if name in known] if is_known else list(names)
        unread[:] = [name for name in names if name not in chosen]
        return chosen

    match file.extension:
        case ".jsonl":
            return readers.read_jsonl(file, complain, limit)
        case ".parquet":
            return readers.read_parquet(file, complain, choose)
        case ".arrow":
            return readers.read_arrow(file, complain, choose)
        case ".warc" | ".wet":
            from modelwright.data.sources.web_archives import read_warc

            return read_warc(file, complain, report.skip)
    assert file.extension in LOOSE_EXTENSIONS
    return _loose_records(file, config, report, complain, limit)


class _NoRecords(Exception):
    """Raised for a file in a directory that is not text."""


def _loose_records(
    file: readers.File, config: SourceConfig, report: SourceReport, complain: readers.Complaint, limit: readers.Limit
) -> Iterator[tuple[str, readers.Record]]:
    """Yields records of a format that is also used for settings and figures: unless the user named the file, it is
    skipped if its first record has neither text nor fields like those of a question.
    """
    is_text = file.is_named or file.entry is not None

    def complain_of_text(reason: str, where: str, problem: str, way_out: str) -> None:
        if not is_text:
            raise _NoRecords
        complain(reason, where, problem, way_out)

    read = readers.read_json if file.extension == ".json" else readers.read_csv
    try:
        for where, record in read(file, complain_of_text, limit):
            is_text = is_text or config.text_field in record or is_image_record(record)
            is_text = is_text or num_hints(record) >= ENOUGH_HINTS
            is_text = is_text or (is_conversation(record) and type_of_record(record) != PROMPT_ONLY)
            if not is_text:
                raise _NoRecords
            yield where, record
    except _NoRecords:
        report.pass_over(f"{file.extension} without text", file.name)


def _document(
    where: str, fields: Fields, source: str, config: SourceConfig, report: SourceReport, complain: readers.Complaint
) -> Document | Unsplit | None:
    """Returns the document in a record; None if it was reported or is empty."""
    record = fields.plain
    if config.own_answers == "refuse" and is_document(record) and is_own(record.get("meta") or {}):
        complain(
            "own text", where, f"{AUTHOR_FIELD} is {OWN_AUTHOR}, so Modelwright itself wrote the text", REMEDY_TEXT
        )
        return None
    if is_document(record):
        fields.take_all()
        if record["kind"] == "qa" and (problem := fields.half_pair(record["meta"])):
            complain("half a surrogate pair", where, problem, HALF_PAIR_REMEDY)
            return None
        document = Document.from_plain({name: record[name] for name in _DOCUMENT_FIELDS if name in record})
        document = document.map_text(encodable)
        return document if document.split != "open" else Unsplit(document)
    if config.own_answers == "refuse" and is_own(record):
        # Such a record is fine if only its prompt is read: a field of text other than the answer.
        field_name = config.fields.get(config.text_field, config.text_field)
        is_text = config.record_type == "text" or config.text_field != DEFAULT_TEXT_FIELD or not is_conversation(record)
        keeps_answer = field_name == ANSWER_FIELD or ANSWER_FIELD in config.keep_fields
        if not is_text or config.text_field not in record or keeps_answer:
            problem = f"{AUTHOR_FIELD} is {OWN_AUTHOR}, so the answer is Modelwright's own and no text to learn from"
            complain("own answer", where, problem, REMEDY)
            return None
    fields.get(AUTHOR_FIELD)
    wants_text = config.text_field != DEFAULT_TEXT_FIELD and config.text_field in record
    wanted = "" if config.record_type in ("auto", "text") else config.record_type
    # Half of a preference pair is read as a pair, so that the complaint is about the other half and not about a text.
    if not wanted and config.text_field not in record and record_type(record) in ("", PROMPT_ONLY):
        wanted = PAIRED if ("chosen" in record) != ("rejected" in record) else ""
    name = "" if config.record_type == "text" or wants_text else wanted
    if not name and config.record_type != "text" and not wants_text and is_conversation(record):
        name = type_of_record(fields)
        # A text with the prompt that it was written for is a text.
        name = "" if name == PROMPT_ONLY and config.text_field in record else name
    if name:
        try:
            reading = read_record(fields, name)
        except ValueError as error:
            reason = error.reason if isinstance(error, PairError) else "bad conversation"
            complain(reason, where, str(error), f"accepted are {FORMS}")
            return None
        text, meta = conversation_meta(reading.turns)
        # A document is mended, but what an example says is learned as it is or not at all.
        if problem := fields.half_pair(meta | reading.meta):
            complain("half a surrogate pair", where, problem, HALF_PAIR_REMEDY)
            return None
        report.record_types[name] = report.record_types.get(name, 0) + 1
        return _finished(where, text, "qa", meta | reading.meta, fields, source, config)
    if config.text_field not in record:
        names = ", ".join(map(str, record)) or "none"
        problem = f"has no field {config.text_field!r} (its fields: {names})"
        remedy = f"name the right one with --data.text_field; pairs are accepted as {FORMS}"
        if num_hints(record):  # a text field alone would omit the answers
            remedy = f"rename them to one of the accepted forms of questions and answers: {FORMS}"
        complain("no text field", where, problem, remedy)
        return None
    text, kind = record[config.text_field], "prose"
    fields.used.add(config.fields.get(config.text_field, config.text_field))
    if record.get("kind") in ("prose", "code"):
        kind = fields["kind"]
    if not isinstance(text, str) and text is not None:
        problem = f"the field {config.text_field!r} holds a {type(text).__name__} where text is expected"
        complain("text is not a string", where, problem, "name another one with --data.text_field")
        return None
    if not text or not text.strip():
        report.skip("empty text", where)
        return None
    if encodable(text) != text:
        report.change("half a surrogate pair became a question mark", where)
    return _finished(where, text, kind, {}, fields, source, config)


def _finished(
    where: str, text: str, kind: Kind, meta: dict[str, Any], fields: Fields, source: str, config: SourceConfig
) -> Unsplit:
    """Returns the document of a text, with the fields of its record that go with it."""
    # A field with a name that `Document` reads must have its type.
    kept = {name: fields.original[name] for name in config.keep_fields if name in fields.original and name not in meta}
    kept = {name: value for name, value in kept.items() if has_types_of_document({name: value})}
    fields.used.update(kept)
    # They do not count as used, because nothing is learned from them: a `score` of 0 or 1 may say what should be.
    plain = fields.plain
    carried = {name: plain[name] for name in CARRIED_FIELDS if isinstance(plain.get(name), (str, int, float))}
    document = Document(id=where, text=text, kind=kind, split="open", source=source, meta={**meta, **kept, **carried})
    return Unsplit(document.map_text(encodable))
