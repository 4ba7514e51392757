"""200 planted values of personal data, from users to an update that learns from what they wrote: none is in the log, an
export, a reference, an alarm, `drift.json`, a shard, a metric, a release or the report.
"""

import json
import time
from pathlib import Path

import httpx
import pytest

from continual_update import new_records, old_records
from continual_world import ADMIN, LOG, World, words_of
from modelwright.cli.main import main
from modelwright.core.config import is_installed
from modelwright.data.clean.folder import read_kept
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.serve.server import ServerThread
from planted_values import planted_values

WINDOW = 50
SENTENCES = (
    "Please write to {} and to {} about the order.",
    "The customer left {} and {} at the desk.",
    "Their entries say {} and {} since May.",
)


def ask(client: httpx.Client, number: int, question: str, values: tuple[str, str]) -> str:
    """One request of a session and a user with such names; returns the answer's id."""
    prompt = f"{question} {SENTENCES[number % 3].format(*values)}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "user": values[0]}
    reply = client.post("/v1/completions", json={**body, "metadata": {"session_id": f"{values[1]} {number}"}})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


def exported(log: Path, path: Path, since: float, count: int) -> Path:
    """The log is written behind the answers."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline
        assert main(["requests", "export", str(log), str(path), "--since", str(since)]) == 0
    return path


@pytest.mark.slow
def test_planted_values_reach_nothing_of_a_loop(
    world: World,
    server: ServerThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog,
) -> None:
    monkeypatch.setattr("modelwright.pipeline.report.charts.is_installed", is_installed)  # charts have texts as well
    values = planted_values()
    pairs = list(zip(values[::2], values[1::2], strict=True))
    asked, run, reference = time.time(), tmp_path / "next", tmp_path / "reference"
    with httpx.Client(base_url=server.url, headers=ADMIN, timeout=60) as client:
        for number in range(5 * WINDOW):
            ask(client, number, old_records([number])[0]["question"], pairs[number % 50])
        usual = exported(tmp_path / LOG, tmp_path / "usual.jsonl", asked, 5 * WINDOW)
        changed_at = time.time()
        for number in range(WINDOW + 10):
            first, second = pairs[50 + number % 50]
            answer = ask(client, number, new_records([8000 + number])[0]["question"] * 3, (first, second))
            feedback = {"id": answer, "score": -1, "label": "wrong", "text": f"Ask {first}, or {second}."}
            assert client.post("/v1/feedback", json=feedback).status_code == 200
        changed = exported(tmp_path / LOG, tmp_path / "changed.jsonl", changed_at, WINDOW + 10)
        assert main(["requests", "export", str(tmp_path / LOG), str(tmp_path / "all.parquet")]) == 0
        metrics = client.get("/metrics").text
    small = ("--window", str(WINDOW), "--run-length", "5")
    assert main(["drift", "freeze", str(usual), "--reference", str(reference), *small]) == 0
    drift = ("drift", "watch", str(changed), "--reference", str(reference), "--state", str(tmp_path / "watch"))
    assert main([*drift, "--once"]) == 0
    assert main(["drift", "check", str(changed), "--reference", str(reference), "--json"]) == 4
    prompts = ("--data.record_type=text", "--data.text_field=prompt", "--replay", "0")
    training = ("--pretrain.num_steps=4", "--pretrain.batch_tokens=512")
    trigger = ("--drift-reference", reference, "--requests", changed)
    assert main(words_of(world, run, *trigger, *prompts, *training, new=changed)) in (0, 5)  # the gate is not asked
    shown = capsys.readouterr()
    tokenizer = Tokenizer.load(run / "pretrain/artifact")
    kept = [json.dumps(document.plain()) for document in read_kept(run / "clean/artifact")]
    rows = [
        tokenizer.decode(row)
        for batch in PackedRows(run / "pack/artifact/pretrain/train").batches(1)
        for row in batch.input_ids_BT.numpy()
    ]
    alarms = [path.read_text() for path in (tmp_path / "watch/alarms").iterdir()]
    for part in (usual.read_text(), changed.read_text(), *alarms, (run / "drift.json").read_text(), *kept[:1]):
        assert "<EMAIL_" in part or "<PHONE_" in part or "<IBAN_" in part
    assert "EMAIL" in "".join(rows)
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    everything += [text.encode() for text in (metrics, caplog.text, shown.out, shown.err, *kept, *rows)]
    for value in values:
        for written in (value, value.replace(" ", "")):
            assert not [1 for content in everything if written.encode() in content], written
