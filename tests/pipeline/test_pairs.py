"""Question/answer pairs alone: they train, and what does not fit into a row is said."""

import json
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from modelwright.cli.main import main
from modelwright.core.artifacts import read_manifest
from modelwright.core.records import column, read_records
from modelwright.data.rows.loader import PackedRows
from modelwright.data.sources.forms import PROMPT_ONLY, RECORD_TYPES, read_conversation, type_of_record
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.pipeline.stages.init import save_model_folder
from tiny_decoder import make_decoder

Command = Callable[..., subprocess.CompletedProcess[str]]
PREPARED = "clean,tokenize,pack"
FORMS = ("question + answer", "instruction (+ input) + output", "prompt + completion", "messages [", "conversations [")


def write_pairs(folder: Path, *, num_pairs: int = 60, words: int = 12, layout: str = "question") -> Path:
    """Sums with worked answers, each of `words` words or a few more, as one JSON Lines file."""
    names = {"question": ("question", "answer"), "instruction": ("instruction", "output")}[layout]
    lines = []
    for number in range(num_pairs):
        worked = " ".join(f"{number} plus {other} is {number + other}." for other in range(words // 4 + 1))
        lines.append(json.dumps({names[0]: f"What is {number} plus {words // 4}?", names[1]: worked}))
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def on(source: Path, small_words: tuple[str, ...]) -> list[str]:
    """The small run's words with other sources."""
    place = small_words.index("--data.sources") + 1
    return [*small_words[:place], str(source), *small_words[place + 1 :]]


def noise(seed: int, num_chars: int) -> str:
    """Text of which a tokenizer makes about one token for each two characters."""
    dice = random.Random(seed)
    return "".join(dice.choice("abcdefghijklmnop qrstuvwxyz ") for _ in range(num_chars))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["question", "instruction"])
def test_pairs_alone_train_from_text_to_report(
    inside: Command, tmp_path: Path, small_words: tuple[str, ...], layout: str
) -> None:
    write_pairs(tmp_path / "pairs", layout=layout)
    words = on(tmp_path / "pairs", small_words)
    stages = "clean,tokenize,pack,pretrain,sft,evaluate,report"
    done = inside(*words, "--run-dir", str(tmp_path / "run"), "--stages", stages)
    assert done.returncode == 0, done.stderr
    assert "pretraining learns from question/answer pairs as text" in done.stderr
    assert "sft: 8 steps" in done.stderr
    assert "bits per byte qa" in done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
    for stage in ("pretrain", "sft"):
        losses = [value for _, value in column(read_records(tmp_path / "run" / stage / "metrics.jsonl"), "loss")]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_pretraining_may_learn_conversations_beside_other_text(
    inside: Command, tmp_path: Path, small_words: tuple[str, ...]
) -> None:
    """With `qa` among the kinds of text, rows of pretraining hold the pairs; fine-tuning has the same rows."""
    text = tmp_path / "text"
    text.mkdir()
    write_pairs(text)
    for name in ("assert", "atom-literals", "class", "compound", "exceptions", "for", "function", "import"):
        (text / f"{name}.txt").write_text(topics[name])
    words = [*on(text, small_words), "--stages", PREPARED]
    found = {}
    for name, kinds in (("without", "[prose, code]"), ("with", "[prose, code, qa]")):
        done = inside(*words, "--run-dir", str(tmp_path / name), "--pack.text_kinds", kinds)
        assert done.returncode == 0, done.stderr
        artifact = tmp_path / name / "pack" / "artifact"
        tokenizer = Tokenizer.load(tmp_path / name / "tokenize" / "artifact")
        batches = PackedRows(artifact / "pretrain" / "train").batches(8)
        found[name] = "".join(tokenizer.decode(row) for batch in batches for row in batch.input_ids_BT.numpy())
        assert read_manifest(artifact).facts["sft/train"]["num_sequences"] > 0
    assert "statement" in found["without"]
    assert "What is 7 plus" not in found["without"]
    assert "statement" in found["with"]
    assert "What is 7 plus" in found["with"]


@pytest.mark.slow
def test_pairs_longer_than_a_row_are_reported(inside: Command, tmp_path: Path, small_words: tuple[str, ...]) -> None:
    source = write_pairs(tmp_path, num_pairs=40, words=12)
    with open(source, "a") as file:
        for number in range(10):
            file.write("\n" + json.dumps({"question": f"Why {number}?", "answer": noise(number, 900)}))
        file.write("\n" + json.dumps({"question": noise(99, 900), "answer": "No answer of it fits."}))
    words = on(source, small_words)
    target = tmp_path / "run"
    done = inside(*words, "--run-dir", str(target), "--stages", PREPARED, "--data.validation_fraction=0")
    assert done.returncode == 0, done.stderr
    (note,) = [line for line in done.stderr.splitlines() if "longer than a row" in line]
    assert "11 of 51 question/answer pairs are longer than a row (pack.seq_len 128)" in note
    assert "10 are truncated, 1 are dropped because no answer fits" in note
    facts = read_manifest(target / "pack" / "artifact").facts
    pairs = facts["pairs/train"]
    assert (pairs["num_conversations"], pairs["num_truncated"], pairs["num_dropped"]) == (51, 10, 1)
    assert facts["sft/train"]["skipped"] == {"no room for an answer": 1}
    assert facts["sft/train"]["num_cut"] == 10

    suggested = note.split("99% of them fit with ")[1].split()
    assert suggested[::2] == ["--pack.seq_len", "--model.max_seq_len"]
    done = inside(
        *words, "--run-dir", str(tmp_path / "wide"), "--stages", PREPARED, "--data.validation_fraction=0", *suggested
    )
    assert done.returncode == 0, done.stderr
    assert "longer than a row" not in done.stderr


def test_pairs_of_which_none_fits_are_an_error_that_names_the_row_length(
    inside: Command, tmp_path: Path, small_words: tuple[str, ...]
) -> None:
    source = tmp_path / "long.jsonl"
    source.write_text("\n".join(json.dumps({"question": noise(n, 900), "answer": f"So {n}."}) for n in range(5)))
    words = on(source, small_words)
    done = inside(
        *words,
        "--run-dir",
        str(tmp_path / "run"),
        "--stages",
        "clean,tokenize,pack,pretrain,sft",
        "--data.validation_fraction=0",
    )
    assert done.returncode == 2
    message = done.stderr.strip().splitlines()[-1]
    assert "5 of 5 question/answer pairs are longer than a row (pack.seq_len 128): none of them fits" in message
    suggested = message.split("99% of them fit with ")[1].split()
    assert suggested[::2] == ["--pack.seq_len", "--model.max_seq_len", "--pretrain.batch_tokens", "--sft.batch_tokens"]
    row_len = int(suggested[1])
    assert suggested[1::2] == [str(row_len), str(row_len), str(4 * row_len), str(4 * row_len)]
    assert "no question/answer pairs" not in done.stderr


def test_overlong_documents_that_are_skipped_leave_no_rows(
    inside: Command, tmp_path: Path, small_words: tuple[str, ...]
) -> None:
    (tmp_path / "long.txt").write_text(noise(1, 4000))
    write_pairs(tmp_path, num_pairs=20)
    words = [*on(tmp_path / "*.*", small_words), "--data.validation_fraction=0", "--pack.long_documents=skip"]
    words += ["--clean.quality.limits", "{min_stop_word_fraction: 0, max_mean_word_chars: 1000}"]
    done = inside(*words, "--run-dir", str(tmp_path / "run"), "--stages", PREPARED)
    assert done.returncode == 0, done.stderr
    facts = read_manifest(tmp_path / "run" / "pack" / "artifact").facts
    assert "pretrain/train" not in facts
    assert facts["pairs/train"]["num_dropped"] == 0
    assert facts["sft/train"]["num_sequences"] == 20


def test_packed_pairs_end_with_the_last_answer(inside: Command, tmp_path: Path, small_words: tuple[str, ...]) -> None:
    source = write_pairs(tmp_path, num_pairs=20)
    with open(source, "a") as file:
        turns = [("user", "Hi."), ("assistant", "Hello."), ("user", "Bye."), ("assistant", "So long."), ("user", "?")]
        file.write("\n" + json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    words = on(source, small_words)
    target = tmp_path / "run"
    done = inside(*words, "--run-dir", str(target), "--stages", PREPARED, "--data.validation_fraction=0")
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.load(target / "tokenize" / "artifact")
    learned = []
    for batch in PackedRows(target / "pack" / "artifact" / "sft" / "train").batches(1):
        for segment in range(int(batch.segments_BT.max()) + 1):
            inside_it = batch.segments_BT == segment
            labels = batch.labels_BT[inside_it]
            ids = batch.input_ids_BT[inside_it]
            assert int(ids[-1]) == tokenizer.end_id
            learned.append(tokenizer.decode(labels[labels >= 0].tolist(), skip_special=False))
    assert "Hello.<|end|>So long.<|end|>" in learned
    assert len(learned) == 21


def test_a_turn_that_the_chat_template_refuses_is_named(inside: Command, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words to learn from"], TokenizerConfig(vocab_size=300))
    save_model_folder(make_decoder(vocab_size=300), tokenizer, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    settings["chat_template"] = refusal + settings["chat_template"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    source = tmp_path / "pairs.jsonl"
    source.write_text(
        '{"question": "Q", "answer": "An answer."}\n{"system": "S", "question": "Q2", "answer": "Another."}'
    )
    rows = (
        "--pack.seq_len=64",
        "--pretrain.batch_tokens=128",
        "--sft.batch_tokens=128",
        "--data.validation_fraction=0",
    )
    done = inside(
        "run", "tiny", "--init-from", str(tmp_path / "model"), "--data.sources", str(source), *rows,
        "--stages", "clean,pack,sft", "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 2
    message = done.stderr.strip().splitlines()[-1]
    assert f"{source}:2: the chat template rejects these messages: no system turns" in message


def test_the_help_and_the_documentation_name_the_forms_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for form in FORMS:
        assert form in shown
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    records = [json.loads(text) for text in re.findall(r"`(\{.*?\})`", page)]
    assert {type_of_record(record) for record in records} == set(RECORD_TYPES)
    for record in records:
        is_prompt = type_of_record(record) == PROMPT_ONLY
        wanted = {"role": "user", "content": "2 + 2?"} if is_prompt else {"role": "assistant", "content": "4"}
        assert read_conversation(record)[-1] == wanted
