"""`modelwright finetune`: lengths that fit the data, the user's own examples kept, results before and after."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finetune_files import write_examples, write_model
from modelwright.core.artifacts import read_manifest
from modelwright.core.config import DataError
from modelwright.data.rows.loader import PackedRows
from modelwright.data.sources.sources import SourceConfig
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_config
from modelwright.recipes.load import finetune_request, measure_records
from refusals import config_error

Command = Callable[..., subprocess.CompletedProcess[str]]
QUICK = (
    "--sft.learning_rate=1e-2", "--sft.num_steps=30", "--sft.num_epochs=0",
    "--data.validation_fraction=0.2", "--training.precision.policy=fp32", "--training.precision.fp32_matmul=default",
    "--serve.int8.backend=int_mm", "--hardware.num_threads=1", "--hardware.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("data") / "boxes.jsonl")


def finetune(command: Command, model: Path, examples: Path, target: Path, *words: str) -> str:
    done = command("finetune", str(model), str(examples), "--run-dir", str(target), *QUICK, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_from_a_folder_and_examples_to_a_better_model(
    inside: Command, model: Path, examples: Path, tmp_path: Path
) -> None:
    """And `transformers` loads the result, which answers like the examples."""
    target = tmp_path / "run"
    shown = finetune(inside, model, examples, target)
    config = yaml.safe_load((target / "config.yaml").read_text())
    facts = {name: read_manifest(target / name / "artifact").facts for name in ("clean", "pack")}
    kept = {split: table["documents"] for split, table in facts["clean"]["clean"]["kept"]["qa"].items()}
    assert sum(kept.values()) == 62  # none of the user's examples is dropped, although many answers are equal
    assert facts["pack"]["pairs/train"]["num_truncated"] == 0
    assert config["pack"]["seq_len"] % 64 == 0
    assert config["sft"]["batch_tokens"] % (4 * config["pack"]["seq_len"]) == 0
    tables = json.loads((target / "evaluate" / "artifact" / "results.json").read_text())
    after, before = (tables["models"][name]["answers"] for name in ("sft", "init"))
    assert after["conversations"] == before["conversations"] == kept["heldout"]
    assert after["perplexity"] < 0.5 * before["perplexity"]
    assert tables["change"]["answers"]["high"] < 0
    assert re.search(r"Perplexity of answers +[\d.]+ \(initial model: [\d.]+\)", shown)
    folder = re.findall(r"^  model +(.*)$", shown, flags=re.MULTILINE)
    assert folder == [str(target / "sft" / "artifact")]
    assert "Held-out answers" in (target / "report.html").read_text()
    again = finetune(inside, model, examples, target)
    assert "ran " not in again
    answers_like_the_examples(target / "sft" / "artifact")


def answers_like_the_examples(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "Box 7: which color?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.startswith("The color is ")


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "share"), [("last_answer", (0.0, 0.9)), ("all", (0.99, 1.0))])
def test_other_tokens_can_be_learned(
    inside: Command, model: Path, examples: Path, tmp_path: Path, loss: str, share: tuple[float, float]
) -> None:
    words = ("--pack.chat_loss", loss, "--sft.num_steps=2", "--pack.seq_len=512", "--stages", "clean,pack,sft")
    done = inside(
        "run", "finetune", "--init-from", str(model), "--data.sources", str(examples),
        "--run-dir", str(tmp_path / "run"), *QUICK, *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = PackedRows(tmp_path / "run" / "pack" / "artifact" / "sft" / "train")
    (batch,) = rows.batches(rows.num_rows)
    real = batch.segments_BT >= 0
    num_predictable = int(real.sum()) - int(((batch.positions_BT == 0) & real).sum())
    assert share[0] <= batch.num_targets / num_predictable <= share[1]


def test_a_part_of_the_stages_keeps_the_lengths_of_all(model: Path, examples: Path, tmp_path: Path) -> None:
    """As in `run`; the training that is added later finds rows that fit it."""
    words = (str(model), [str(examples)], {}, str(tmp_path / "run"))
    part, whole = finetune_request(*words, only=("clean", "pack")), finetune_request(*words)
    assert part.config.stage_names == ["clean", "pack"]
    assert part.config.section("pack") == whole.config.section("pack")
    assert "sft" in part.config.further_sections


def test_lengths_follow_the_records(model: Path, examples: Path) -> None:
    tokenizer, max_len = Tokenizer.load(model), load_config(model).max_seq_len
    measured = measure_records(SourceConfig(sources=(str(examples),)), tokenizer, max_seq_len=max_len)
    assert measured.num_conversations == 62
    request = finetune_request(str(model), [str(examples)], {})
    row_len = request.config.section("pack").seq_len
    assert measured.row_len <= row_len < measured.row_len + 64
    assert request.config.name == "tiny-boxes"
    batch = request.config.section("sft").batch_tokens
    assert batch % (4 * row_len) == 0
    assert abs(batch / measured.mean_tokens - 16) <= 4 * row_len / measured.mean_tokens
    both = finetune_request(str(model), [str(examples)], {}, num_processes=2).config.section("sft").batch_tokens
    assert both % (8 * row_len) == 0


def test_lengths_that_are_given_stay(model: Path, examples: Path) -> None:
    given = {"pack": {"seq_len": 256}, "sft": {"batch_tokens": 2048}}
    config = finetune_request(str(model), [str(examples)], given).config
    assert (config.section("pack").seq_len, config.section("sft").batch_tokens) == (256, 2048)
    one = finetune_request(str(model), [str(examples)], {"pack": {"seq_len": 128}}).config
    assert one.section("pack").seq_len == 128
    assert one.section("sft").batch_tokens % 512 == 0


def test_rows_are_no_longer_than_the_models_context(examples: Path, tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", max_seq_len=64)
    assert finetune_request(str(short), [str(examples)], {}).config.section("pack").seq_len == 64


def test_bad_input_names_what_is_wrong(model: Path, examples: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "no pairs at all"}\n')
    with pytest.raises(DataError, match=r"text\.jsonl: no record is a question with its answer"):
        finetune_request(str(model), [str(text)], {})
    with config_error("nowhere"):
        finetune_request("nowhere", [str(examples)], {})
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        finetune_request(str(model), ["missing.jsonl"], {})
    plain = write_model(tmp_path / "plain", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"boxes\.jsonl:61: the chat template does not support tools"):
        finetune_request(str(plain), [str(examples)], {})


def test_a_dry_run_shows_memory_and_time(inside: Command, model: Path, examples: Path, tmp_path: Path) -> None:
    done = inside("finetune", str(model), str(examples), "--run-dir", str(tmp_path / "run"), *QUICK, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "left to do: about" in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_recipe_alone_says_what_is_missing(inside: Command) -> None:
    done = inside("config", "finetune")
    assert done.returncode == 2
    assert "start from a model folder with init_from" in done.stderr
