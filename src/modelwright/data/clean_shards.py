"""What is done to each shard of documents by itself, in worker processes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.clean_config import CleanConfig
from modelwright.data.document import KINDS, Document
from modelwright.data.shard_files import ShardFiles, pack_arrays, pack_lines, unpack_documents, unpack_lines, write_file
from modelwright.data.steps.format import Format
from modelwright.data.steps.privacy import Privacy
from modelwright.data.steps.quality import FEATURES, has_language, measure
from modelwright.data.steps.shingles import fingerprints
from modelwright.data.steps.step import Drop

_Item = tuple[str, int, CleanConfig]


def measure_shard(item: _Item) -> tuple[int, int, dict[str, Any]]:
    """The stage format, and all features and fingerprints of what it keeps."""
    folder, number, config = item
    files = ShardFiles(Path(folder), number)
    facts = files.facts("measured")
    if facts is None:
        documents = unpack_documents(files.read("raw", "raw.zst"))
        step = Format(config.format)
        kept: list[Document] = []
        dropped: list[str] = []
        for document in documents:
            result = step(document)
            if isinstance(result, Drop):
                dropped.append(_drop_line(document, step.name, result))
            else:
                kept.append(result)
        prints = fingerprints(kept)
        arrays = {
            "features": np.array([measure(document, config.quality) for document in kept], np.float32).reshape(
                -1, len(FEATURES)
            ),
            "language": np.array([has_language(document, config.quality) for document in kept], np.bool_),
            "kind": np.array([KINDS.index(document.kind) for document in kept], np.int8),
            "split": np.array([document.split == "heldout" for document in kept], np.int8),
            "ids": np.frombuffer(json.dumps([document.id for document in kept]).encode(), np.uint8),
            **vars(prints),
        }
        write_file(files.path("docs.zst"), pack_lines((document.to_json() for document in kept), level=1))
        write_file(files.path("format.zst"), pack_lines(dropped, level=1))
        write_file(files.path("arrays.npz"), pack_arrays(arrays))
        facts = {"documents": len(documents)}
        files.finish("measured", ["docs.zst", "format.zst", "arrays.npz"], facts)
    return number, facts["documents"], facts


def write_shard(item: _Item) -> tuple[int, int, dict[str, Any]]:
    """Drop what was decided, replace personal data, and write both. Only values of kept documents are counted."""
    folder, number, config = item
    files = ShardFiles(Path(folder), number)
    facts = files.facts("written")
    if facts is None:
        documents = unpack_documents(files.read("measured", "docs.zst"))
        drops = {index: entry for index, *entry in json.loads(files.read("decided", "drops.json"))}
        lines = unpack_lines(files.read("measured", "format.zst"))
        privacy = Privacy(config.privacy)
        kept: list[str] = []
        counts, replaced = _Counts(), Counter[str]()
        for position, line in enumerate(lines):
            entry = json.loads(line)
            step, drop = entry.pop("step"), Drop(entry.pop("reason"), entry.pop("detail"))
            counts.add("dropped", step, drop.reason, entry["text"])
            lines[position] = _drop_line(privacy(Document.from_plain(entry))[0], step, drop)
        for index, document in enumerate(documents):
            if index in drops:
                step, reason, detail = drops[index]
                lines.append(_drop_line(privacy(document)[0], step, Drop(reason, detail)))
                counts.add("dropped", step, reason, document.text)
            else:
                document, values = privacy(document)
                replaced += values
                kept.append(document.to_json())
                counts.add("kept", document.kind, document.split, document.text)
        write_file(files.path("kept.zst"), pack_lines(kept))
        write_file(files.path("dropped.zst"), pack_lines(lines))
        facts = {
            **counts.facts(),
            "replaced": replaced,
            "failed_validators": privacy.failures,
            "documents": len(documents),
        }
        files.finish("written", ["kept.zst", "dropped.zst"], facts)
    return number, facts["documents"], facts


class _Counts:
    """Documents and bytes by two names."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[tuple[str, str], dict[str, int]]] = {"kept": {}, "dropped": {}}

    def add(self, which: str, first: str, second: str, text: str) -> None:
        entry = self._entries[which].setdefault((first, second), {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8", "replace"))

    def facts(self) -> dict[str, list[tuple[str, str, dict[str, int]]]]:
        return {which: [(*names, entry) for names, entry in part.items()] for which, part in self._entries.items()}


def _drop_line(document: Document, step: str, drop: Drop) -> str:
    entry = {"step": step, "reason": drop.reason, "detail": drop.detail, **document.plain()}
    return json.dumps(entry, ensure_ascii=False)
