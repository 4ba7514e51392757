"""Reports what cleaning did: as counts for a corpus (`report.json`), and with the reason for one document."""

import difflib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from modelwright.core.config import DataError
from modelwright.data.clean.config import FAILED, STEPS
from modelwright.data.clean.features import FEATURES, measure
from modelwright.data.clean.folder import REPORT, read_dropped, read_kept

# Fields that corpus steps fill.
_BY_STEPS = ("limits", "remedies", "noise", "figures")
_EXCERPT_CHARS = 1000
_MOST_SIMILAR_NAMES = 100_000


@dataclass(kw_only=True)
class CleanReport:
    """Results of cleaning: counts, limits and figures of the steps."""

    num_documents: int = 0
    num_bytes: int = 0
    """UTF-8 bytes."""
    steps: list[str] = field(default_factory=list)
    """The steps that ran, in their order."""
    kept: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """`kept[kind][split]`: `{"documents": n, "bytes": UTF-8 bytes}`."""
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """Names of the files of kept documents: `files[split][kind]`."""
    dropped: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """`dropped[step][reason]`, in the same form."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Values of each kind that the step privacy replaced."""
    changed_examples: dict[str, int] = field(default_factory=dict)
    """Questions, answers and conversations that a step changed, by step."""
    kept_lengths: dict[str, int] = field(default_factory=dict)
    """Kept documents by length: the largest power of two that is at most the number of characters."""
    dropped_lengths: dict[str, int] = field(default_factory=dict)
    """Dropped documents, in the same form."""
    languages: dict[str, int] = field(default_factory=dict)
    """Languages (ISO 639-1 codes) of every 20th kept document of prose and pairs, of shards of at least 500."""
    failed_validators: dict[str, int] = field(default_factory=dict)
    """Number of exceptions of each validator of the step privacy; the values stayed in the text."""
    limits: dict[str, dict[str, float]] = field(default_factory=dict)
    """Limits of the step quality, by kind of document."""
    remedies: dict[str, str] = field(default_factory=dict)
    """Options that keep what this step dropped, by reason."""
    noise: dict[str, Any] = field(default_factory=dict)
    """Training of the classifier, and its precision and recall on documents and generators it did not see."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of other corpus steps, by step."""

    @property
    def num_kept(self) -> int:
        return sum(entry["documents"] for splits in self.kept.values() for entry in splits.values())

    @property
    def num_dropped(self) -> int:
        return sum(entry["documents"] for reasons in self.dropped.values() for entry in reasons.values())

    def plain(self) -> dict[str, Any]:
        """The fields as plain data; empty `figures` and `changed_examples` are omitted."""
        return {
            name: value for name, value in asdict(self).items() if value or name not in ("figures", "changed_examples")
        }

    def add(self, step: str, entries: Mapping[str, Any]) -> None:
        """Adds the report of a corpus step. Raises `DataError` for a field that does not belong to corpus steps."""
        for name, value in entries.items():
            if name not in _BY_STEPS:
                raise DataError(f"{step}: reports {name!r}, which is not one of {', '.join(_BY_STEPS)}")
            getattr(self, name).update({step: value} if name == "figures" else value)

    def merge(self, fields: Mapping[str, Any]) -> None:
        """Adds the reports of the corpus steps of a phase, from `plain`."""
        for name in _BY_STEPS:
            getattr(self, name).update(fields.get(name, {}))

    def count(self, facts: Mapping[str, Any]) -> None:
        """Adds the documents and counters of one shard."""
        for which in ("kept", "dropped"):
            for first, second, entry in facts[which]:
                total = getattr(self, which).setdefault(first, {}).setdefault(second, {"documents": 0, "bytes": 0})
                for unit in total:
                    total[unit] += entry[unit]
        for name, counters in facts["counts"].items():
            setattr(self, name, dict(Counter(getattr(self, name)) + Counter(counters)))


def describe_drops(report: CleanReport) -> str:
    """`71 dropped: 66 duplicate, 5 near-duplicate (keep them with --clean.duplicates.near false)`."""
    remedies = {reason: option for spec in STEPS for reason, option in spec.remedies.items()}
    reasons: list[str] = []
    for step, entries in report.dropped.items():
        for reason, entry in entries.items():
            remedy = report.remedies.get(reason) or remedies.get(reason)
            hint = f" (keep {'them' if entry['documents'] > 1 else 'it'} with {remedy})" if remedy else ""
            name = f"{step}: {reason}" if reason == FAILED else reason
            reasons.append(f"{entry['documents']:,} {name}{hint}")
    return f"{report.num_dropped:,} dropped" + (f": {', '.join(reasons)}" if reasons else "")


def explain(folder: Path, identifier: str) -> str:
    """Describes what happened to the document of this id in a folder of cleaned documents.

    Raises `DataError` if the folder does not have the document, and names similar ids.
    """
    dropped_documents = ((dropped.document, dropped) for dropped in read_dropped(folder))
    kept_documents = ((document, None) for document in read_kept(folder))
    for document, dropped in chain(dropped_documents, kept_documents):
        if document.id != identifier:
            continue
        result = "kept"
        if dropped is not None:
            detail = f": {dropped.detail}" if dropped.detail else ""
            result = f"dropped by {dropped.step}, {dropped.reason}{detail}"
        lines = [
            f"id        {document.id}",
            f"source    {document.source}",
            f"kind      {document.kind}, {document.split}",
            f"result    {result}",
            "",
            f"{'feature':<26}{'value':>12}{'min':>12}{'max':>12}",
        ]
        limits = json.loads((folder / REPORT).read_text())["limits"].get(document.kind, {})
        for name, value in zip(FEATURES, measure(document), strict=True):
            low, high = (f"{limits[key]:.4g}" if (key := f"{side}_{name}") in limits else "" for side in ("min", "max"))
            lines.append(f"{name:<26}{value:>12.4g}{low:>12}{high:>12}")
        text = document.text[:_EXCERPT_CHARS] + (" ..." if len(document.text) > _EXCERPT_CHARS else "")
        return "\n".join([*lines, "", text])
    names = [dropped.document.id for dropped in islice(read_dropped(folder), _MOST_SIMILAR_NAMES)]
    names += [document.id for document in islice(read_kept(folder), _MOST_SIMILAR_NAMES)]
    near = difflib.get_close_matches(identifier, names, n=3, cutoff=0.0)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise DataError(f"{folder}: document {identifier!r} not found{hint}")
