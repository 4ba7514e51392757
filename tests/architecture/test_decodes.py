"""How often a run decodes the documents that cleaning kept: at most three times each before it trains."""

import json
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from modelwright.cli.main import main
from modelwright.data.clean import folder as clean_folder
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document

MOST_DECODES = 3
NOUNS = ("river", "house", "teacher", "garden", "letter", "market", "bridge", "window", "doctor", "village")


def write_source(path: Path) -> None:
    dice = Random(1)
    sentence = "The {} of the {} was told about the {} with number {}."
    sentences = [
        " ".join(sentence.format(*dice.choices(NOUNS, k=3), dice.randrange(10_000)) for _ in range(8))
        for _ in range(80)
    ]
    records = [{"text": text} for text in sentences[:40]]
    records += [{"question": f"Which {n} texts are these?", "answer": text} for n, text in enumerate(sentences[40:])]
    path.write_text("\n".join(map(json.dumps, records)))


def test_kept_documents_are_decoded_three_times_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(tmp_path / "texts.jsonl")
    decode, decodes = Document.from_json, Counter[str]()

    def counted(line: str) -> Document:
        document = decode(line)
        if sys._getframe(1).f_globals["__name__"] == clean_folder.__name__:  # cleaning itself decodes shards elsewhere
            decodes[document.id] += 1
        return document

    with monkeypatch.context() as patch:
        patch.setattr(Document, "from_json", staticmethod(counted))
        words = ("--stages", "clean,tokenize,pack", "--run-dir", str(tmp_path / "run"))
        assert main(["run", "tiny", *words, "--data.sources", str(tmp_path / "texts.jsonl")]) == 0
    kept = {document.id: document for document in read_kept(tmp_path / "run" / "clean" / "artifact")}
    assert {document.kind for document in kept.values()} == {"prose", "qa"}
    assert set(decodes) == set(kept), "every document is read"
    assert max(decodes.values()) <= MOST_DECODES
