"""200 planted values of personal data: none in a document that is kept, a shard, a log, a metric or the report."""

import json
from pathlib import Path

from modelwright.cli.main import main
from modelwright.data.clean.folder import read_kept
from modelwright.data.clean.steps.privacy import KINDS
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from planted_values import planted_values

SENTENCES = (
    "Please write to {} about the order.",
    "The customer left {} at the desk.",
    "Their entry says {} since May.",
)


def test_planted_values_reach_no_file_of_a_run(tmp_path: Path) -> None:
    values = planted_values()
    assert len(set(values)) == 200
    with open(tmp_path / "letters.jsonl", "w", encoding="utf-8") as file:
        for number, value in enumerate(values):
            text = f"Letter {number} of the archive. {SENTENCES[number % 3].format(value)} Nothing else was asked."
            file.write(json.dumps({"text": text}) + "\n")
    run = tmp_path / "run"
    words = ["run", "tiny", "--run-dir", str(run), "--data.sources", str(tmp_path / "letters.jsonl")]
    words += ["--data.validation_fraction=0.1", "--tokenizer.vocab_size=400", "--pack.seq_len=64"]
    words += ["--model.max_seq_len=64", "--pretrain.num_steps=2", "--pretrain.batch_tokens=256"]
    words += ["--clean.privacy.replace", *KINDS]
    assert main([*words, "--stages", "clean,tokenize,pack,pretrain,report"]) == 0
    kept = list(read_kept(run / "clean" / "artifact"))
    assert len(kept) > 100
    tokenizer = Tokenizer.load(run / "tokenize" / "artifact")
    shards = [
        tokenizer.decode(row)
        for split in ("train", "heldout")
        for batch in PackedRows(run / "pack" / "artifact" / "pretrain" / split).batches(1)
        for row in batch.input_ids_BT.numpy()
    ]
    decoded = "\n".join([*(json.dumps(document.plain()) for document in kept), *shards])
    assert "Letter" in decoded
    assert "EMAIL" in decoded
    files = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    for value in values:
        for written in (value, value.replace(" ", "")):
            assert written not in decoded
            assert not [1 for content in files if written.encode() in content], written
