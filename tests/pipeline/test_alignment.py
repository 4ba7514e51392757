"""Alignment stages from records to a report: what they learn, what later stages use, and what is left out by name."""

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core.artifacts import read_manifest
from modelwright.core.records import column, read_records
from modelwright.data.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.pipeline.stages.model_folder import save_model_folder
from tiny_decoder import make_decoder

Command = Callable[..., subprocess.CompletedProcess[str]]
WORDS = [a + b for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va")]


def sentence(dice: random.Random, num_words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(num_words)).capitalize() + "."


def write_pairs(path: Path, *, num_pairs: int = 40) -> Path:
    """Pairs whose chosen answer ends with one word and whose rejected one with another, in three layouts."""
    dice = random.Random(4)
    lines = []
    for number in range(num_pairs):
        prompt = f"Say {sentence(dice, 3)} {number}"
        good, bad = f"{sentence(dice, 4)} yes", f"{sentence(dice, 4)} no"
        turn = {"role": "user", "content": prompt}
        lines.append(
            [
                {"prompt": prompt, "chosen": good, "rejected": bad, "margin": 0.5},
                {"chosen": f"\n\nHuman: {prompt}\n\nAssistant: {good}",
                 "rejected": f"\n\nHuman: {prompt}\n\nAssistant: {bad}"},
                {"prompt": prompt, "chosen": [turn, {"role": "assistant", "content": good}],
                 "rejected": [turn, {"role": "assistant", "content": bad}]},
            ][number % 3]
        )  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder to start from."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = train_tokenizer([f"Say yes or no: {' '.join(WORDS)}"] * 3, TokenizerConfig(vocab_size=320))
    save_model_folder(make_decoder(vocab_size=320), tokenizer, folder)
    return folder


def words(start: Path, source: Path, run: Path, stages: str, *more: str) -> list[str]:
    """The command for a run of these stages on the pairs."""
    settings = (
        "--pack.seq_len=64",
        "--data.validation_fraction=0.2",
        "--clean.quality.limits={}",
    )
    return ["run", "tiny", "--init-from", str(start), "--data.sources", str(source), "--run-dir", str(run),
            "--stages", stages, *settings, *more]  # fmt: skip


STEPS = ("num_steps=8", "batch_tokens=256", "learning_rate=1e-3", "eval_every_steps=4", "checkpoint_every_steps=4")


def of(stage: str) -> list[str]:
    """Settings of a short training."""
    return [f"--{stage}.{setting}" for setting in STEPS]


def test_dpo_prefers_the_chosen_answers(inside: Command, start: Path, tmp_path: Path) -> None:
    source, run = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "run"
    long = {"prompt": sentence(random.Random(1), 100), "chosen": "yes", "rejected": "no"}
    source.write_text("\n".join([source.read_text(), json.dumps(long)]))
    done = inside(*words(start, source, run, "clean,pack,dpo,report", *of("dpo")))
    assert done.returncode == 0, done.stderr
    records = read_records(run / "dpo" / "metrics.jsonl")
    margins = [value for _, value in column(records, "rewards/margins")]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert margins[-1] > 0.01
    assert column(records, "heldout/rewards/accuracies")[-1][1] == 1.0
    facts = read_manifest(run / "pack" / "artifact").facts
    reports = [facts[f"preference_pairs/{split}"] for split in ("train", "heldout")]
    assert sum(report["num_sequences"] for report in reports) == 41
    assert sum((Counter(report["skipped"]) for report in reports), Counter()) == {"prompt longer than a row": 1}
    page = (run / "report.html").read_text()
    assert "Share of pairs in the right order" in page
    again = inside(*words(start, source, run, "clean,pack,dpo,report", *of("dpo")))
    assert again.returncode == 0, again.stderr


def test_kto_raises_the_desirable_answers(inside: Command, start: Path, tmp_path: Path) -> None:
    dice, lines = random.Random(5), []
    for number in range(40):
        answer = f"{sentence(dice, 4)} {'yes' if number % 2 else 'no'}"
        lines.append({"prompt": f"Say {sentence(dice, 3)} {number}", "completion": answer, "label": number % 2 == 1})
    source, run = tmp_path / "labeled.jsonl", tmp_path / "run"
    source.write_text("\n".join(map(json.dumps, lines)))
    done = inside(*words(start, source, run, "clean,pack,sft,kto,report", *of("sft"), *of("kto")))
    assert done.returncode == 0, done.stderr
    records = read_records(run / "kto" / "metrics.jsonl")
    assert column(records, "rewards/chosen")[0][1] == pytest.approx(0.0, abs=1e-5)
    assert column(records, "heldout/rewards/chosen")[-1][1] > column(records, "heldout/rewards/rejected")[-1][1]
    facts = read_manifest(run / "pack" / "artifact").facts
    assert facts["sft/train"]["num_sequences"] + facts["sft/heldout"]["num_sequences"] == 20
    assert facts["labeled_answers/train"]["num_rows"] % 2 == 0


def test_bad_pairs_are_named(inside: Command, start: Path, tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl")
    source.write_text("\n".join([source.read_text(), json.dumps({"prompt": "Q", "chosen": "A"})]))
    done = inside(*words(start, source, tmp_path / "bad", "clean,pack,dpo", *of("dpo")))
    assert done.returncode == 2
    assert f"{source}:41: a record of type preference needs the field 'rejected'" in done.stderr
    source.write_text("\n".join(json.dumps({"question": f"Say {n}", "answer": f"{n} yes"}) for n in range(9)))
    done = inside(*words(start, source, tmp_path / "none", "clean,pack,dpo", *of("dpo")))
    assert done.returncode == 2
    assert "dpo: no preference pair is left to train on" in done.stderr
