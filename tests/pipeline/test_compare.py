"""`modelwright compare` on model folders: records with answers, choices and numbers; other tokenizers; bad input."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune_files import write_model
from modelwright.core.progress import SilentProgress
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig, generate_numbers, score_choices
from modelwright.model.attention import causal_attend
from modelwright.model.hf import load_model

Command = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("--num-records=1", "--max-new-tokens=4", "--resamples=100")
RECORDS = [
    {"question": "One plus two?", "answer": "One plus two is three.\n#### 3"},
    {"question": "Two plus two?", "answer": "Two plus two is four.\n#### 4"},
    {"question": "Warm?", "choices": ["Yes, it is warm.", "No.", "Perhaps it is."], "answer": "B"},
    {"question": "Cold?", "choices": {"text": ["Yes.", "No, not at all."], "label": ["1", "2"]}, "answerKey": "2"},
    {"question": "Box 3?", "answer": "It is red."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, one with another, and records."""
    folder = tmp_path_factory.mktemp("compare")
    write_model(folder / "a")
    write_model(folder / "b", init_std=0.3)
    write_model(folder / "other", vocab_size=300)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


def documents(folder: Path):
    config = SourceConfig(sources=(str(folder / "records.jsonl"),), validation_fraction=0.0)
    return list(read_documents(config, report=SourceReport()))


def compared(command: Command, folder: Path, *words: str) -> dict:
    done = command(
        "compare", *words, str(folder / "records.jsonl"), "--json", "--resamples", "200", "--max-new-tokens", "8"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_models_of_one_tokenizer(inside: Command, folder: Path) -> None:
    result = compared(inside, folder, str(folder / "a"), str(folder / "b"))
    measures = {measure["name"]: measure for measure in result["measures"]}
    assert {name: measure["num_records"] for name, measure in measures.items()} == {
        "nats per token of answers": 5,
        "bits per byte of answers": 5,
        "multiple choice": 2,
        "exact match of numbers": 2,
    }
    for measure in measures.values():
        assert measure["difference"] == pytest.approx(measure["second"] - measure["first"])
        assert measure["low"] <= measure["difference"] + 1e-12
        assert measure["difference"] <= measure["high"] + 1e-12
    done = inside("compare", str(folder / "a"), str(folder / "a"), str(folder / "records.jsonl"), *QUICK)
    assert "perplexity of answers" in done.stdout
    assert "+0.0000 to +0.0000" in done.stdout


def test_other_tokenizers_are_compared_in_bits_per_byte(inside: Command, folder: Path) -> None:
    names = [m["name"] for m in compared(inside, folder, str(folder / "a"), str(folder / "other"))["measures"]]
    assert "nats per token of answers" not in names
    assert "bits per byte of answers" in names


def test_choices_are_those_of_a_plain_forward_pass(folder: Path) -> None:
    model, tokenizer = load_model(folder / "b").eval(), Tokenizer.load(folder / "b")
    rows = score_choices(model, tokenizer, documents(folder), EvaluateConfig(), progress=SilentProgress())
    asked = [document for document in documents(folder) if "choices" in document.meta]
    assert [row["right"] for row in rows] == [1, 1]
    for row, document in zip(rows, asked, strict=True):
        prompt = tokenizer.chat.encode_prompt(document.messages[:1])
        nats = []
        for text in document.meta["choices"]:
            ids = torch.tensor([[*prompt, *tokenizer.encode(text)]])
            with torch.no_grad():
                hidden = model(ids, torch.arange(ids.shape[1])[None], causal_attend())
                logs = model.logits(hidden)[0].log_softmax(-1)
            cost = -sum(float(logs[place - 1, ids[0, place]]) for place in range(len(prompt), ids.shape[1]))
            nats.append(cost / len(text.encode()))
        assert row["choice"] == nats.index(min(nats))


def test_numbers_are_generated_greedily_and_compared(folder: Path) -> None:
    model, tokenizer = load_model(folder / "a").eval(), Tokenizer.load(folder / "a")
    rows = generate_numbers(model, tokenizer, documents(folder), max_new_tokens=6, progress=SilentProgress())
    assert [row["id"].rpartition(":")[2] for row in rows] == ["1", "2"]
    prompt = tokenizer.chat.encode_prompt([{"role": "user", "content": RECORDS[0]["question"]}])
    ids = list(prompt)
    while len(ids) < len(prompt) + 6 and ids[-1] not in tokenizer.stop_ids:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            hidden = model(tokens, torch.arange(len(ids))[None], causal_attend())
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
    assert rows[0]["answer"] == tokenizer.decode(ids[len(prompt) :])
    assert rows[0]["correct"] is False


@pytest.mark.parametrize(("record", "problem"), [
    ({"question": "Q", "choices": ["one"], "answer": 0}, "not a list of two or more texts"),
    ({"question": "Q", "choices": ["x", "y"], "answer": "C"}, "neither the place nor the label nor the text"),
    ({"question": "Q", "choices": ["x", "y"], "answer": 2}, "neither the place nor the label nor the text"),
])  # fmt: skip
def test_bad_choices_are_refused_with_file_and_line(
    inside: Command, folder: Path, tmp_path: Path, record: dict, problem: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text(json.dumps(record))
    done = inside("compare", str(folder / "a"), str(folder / "b"), str(source))
    assert done.returncode == 2
    assert "bad.jsonl:1" in done.stderr
    assert problem in done.stderr


def test_a_file_without_records_is_refused(inside: Command, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("Only prose here, and nothing to ask.")
    done = inside("compare", str(folder / "a"), str(folder / "b"), str(source))
    assert done.returncode == 2
    assert "no record is a question with its answer" in done.stderr
