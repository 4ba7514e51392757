"""Alignment stages from records to a report: what they learn, what later stages use, and what is left out by name."""

import json
import math
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from modelwright.core.artifacts import read_manifest
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.hf import save_model
from modelwright.objectives.preference import (
    Kto,
    KtoConfig,
    Preference,
    PreferenceConfig,
    RewardModelConfig,
    RewardModeling,
    load_reward_model,
)
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.train.config import TrainConfig
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


def write_labeled(path: Path) -> Path:
    """Answers of which every second one is desirable."""
    dice, lines = random.Random(5), []
    for number in range(40):
        answer = f"{sentence(dice, 4)} {'yes' if number % 2 else 'no'}"
        lines.append({"prompt": f"Say {sentence(dice, 3)} {number}", "completion": answer, "label": number % 2 == 1})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the page name: a model and records."""
    place = tmp_path_factory.mktemp("place")
    tokenizer = train_tokenizer([f"Say yes or no: {' '.join(WORDS)}"] * 3, TokenizerConfig(vocab_size=320))
    save_model_folder(make_decoder(vocab_size=320), tokenizer, place / "my-model")
    write_pairs(place / "pairs.jsonl")
    write_labeled(place / "labeled.jsonl")
    return place


PAGE = (Path(__file__).parents[2] / "docs" / "alignment.md").read_text(encoding="utf-8")
COMMANDS = [line.split()[1:] for line in PAGE.splitlines() if line.startswith("    modelwright ")]
STEPS = ("num_steps=8", "batch_tokens=256", "learning_rate=1e-3", "eval_every_steps=4", "checkpoint_every_steps=4")
SHORT = (
    "--pack.seq_len=64", "--data.validation_fraction=0.2", "--hardware.num_threads=1",
    "--training.precision.policy=fp32", "--training.precision.fp32_matmul=default",
)  # fmt: skip


def run_here(inside: Command, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command with settings for a short run."""
    stages = words[words.index("--stages") + 1].split(",")
    trainings = [stage for stage in stages if stage in ("sft", "reward", "dpo", "kto", "ppo")]
    return inside(*words, *SHORT, *(f"--{stage}.{setting}" for stage in trainings for setting in STEPS))


@pytest.mark.slow
def test_pairs_make_a_reward_model_and_a_better_policy(
    inside: Command, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (command,) = (words for words in COMMANDS if "aligned" in words)
    with open("pairs.jsonl", "a") as file:
        file.write("\n" + json.dumps({"prompt": sentence(random.Random(1), 100), "chosen": "yes", "rejected": "no"}))
    done = run_here(inside, command)
    assert done.returncode == 0, done.stderr
    run = Path("runs/aligned")
    facts = read_manifest(run / "pack" / "artifact").facts
    reports = [facts[f"preference_pairs/{split}"] for split in ("train", "heldout")]
    assert sum(report["num_sequences"] for report in reports) == 41
    assert sum((Counter(report["skipped"]) for report in reports), Counter()) == {"prompt longer than a row": 1}

    records = read_records(run / "dpo" / "metrics.jsonl")
    assert column(records, "loss")[0][1] == pytest.approx(math.log(2), abs=1e-5)  # its reference is no reward model
    assert column(records, "rewards/margins")[-1][1] > 0.01
    assert column(records, "heldout/rewards/accuracies")[-1][1] == 1.0
    judged = read_manifest(run / "reward" / "artifact").facts["heldout_pairs"]
    assert judged["accuracy"] == 1.0
    assert judged["num_pairs"] == sum(one["count"] for one in judged["bins"]) > 0
    assert not (run / "reward" / "samples.jsonl").exists()
    page = (run / "report.html").read_text()
    assert "Reliability on held-out pairs" in page
    assert "Share of pairs in the right order" in page
    check_scores(run / "reward" / "artifact")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    capsys.readouterr()
    exec(code, {})
    assert re.search(r"^tensor\(\[-?\d+\.\d+\]\)$", capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_reward_model_of_a_run_scores_the_answers_of_its_policy(
    inside: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    write_pairs(Path("pairs.jsonl"))
    with open("pairs.jsonl", "a") as file:  # prompts of its own, without a pair
        file.writelines("\n" + json.dumps({"question": f"Say yes {n}", "answer": f"Kana {n}"}) for n in range(10))
    (command,) = (words for words in COMMANDS if "rewarded" in words)
    words = [*command, "--rollout.max_completion_length=6"]
    done = run_here(inside, words)
    assert done.returncode == 0, done.stderr
    run = Path("runs/rewarded")
    parents = read_manifest(run / "ppo" / "artifact").inputs
    assert {"sft", "reward", "pack"} <= set(parents)
    facts = read_manifest(run / "pack" / "artifact").facts
    num_prompts = facts["prompts/train"]["num_sequences"] + facts["prompts/heldout"]["num_sequences"]
    assert num_prompts == 50
    updates = [record for record in read_records(run / "ppo" / "metrics.jsonl") if "reward" in record]
    assert updates[0]["reward"] == updates[0]["rewards/model/mean"]
    assert abs(updates[0]["objective/kl"]) < 1e-4  # the policy starts from sft, its reference
    judge, tokenizer = load_reward_model(run / "reward" / "artifact"), Tokenizer.load(run / "reward" / "artifact")
    first = [one for one in read_records(run / "ppo" / "completions.jsonl") if one["rollout"] == 0]
    for one in first:
        ids = [*tokenizer.chat.encode_prompt([{"role": "user", "content": one["prompt"]}])]
        answers = [[*ids, *tokenizer.encode(one["completion"]), *end] for end in ((), (tokenizer.end_id,))]
        scores = [float(judge.score(TokenBatch.of_sequences([np.array(ids)]))) for ids in answers]
        assert min(abs(score - one["reward"]) for score in scores) < 1e-4
    assert "Reward model" in (run / "report.html").read_text()


def test_terms_without_a_reward_model_say_what_is_missing(
    inside: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = ["run", "tiny", "--init-from", "my-model", "--data.sources", "pairs.jsonl", "--stages", "clean,pack,ppo"]
    done = run_here(inside, [*words, "--run-dir", str(tmp_path / "run"), "--ppo.rewards={model: {}}"])
    assert done.returncode == 2
    assert "stages: ppo needs reward; add it" in done.stderr


def check_scores(folder: Path) -> None:
    """Ours are those of `transformers`."""
    tokenizer = Tokenizer.load(folder)
    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Kana yes"}]
    ids, _ = tokenizer.chat.encode_chat(turns)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert (theirs.config.num_labels, theirs.config.pad_token_id) == (1, tokenizer.id_of("<|pad|>"))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None]).logits[0]
    scores = load_reward_model(folder).score(TokenBatch.of_sequences([ids]))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_labels_raise_desirable_answers(inside: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (command,) = (words for words in COMMANDS if "labeled" in words)
    done = run_here(inside, command)
    assert done.returncode == 0, done.stderr
    run = Path("runs/labeled")
    records = read_records(run / "kto" / "metrics.jsonl")
    assert column(records, "rewards/chosen")[0][1] == pytest.approx(0.0, abs=1e-5)
    assert column(records, "heldout/rewards/chosen")[-1][1] > column(records, "heldout/rewards/rejected")[-1][1]
    facts = read_manifest(run / "pack" / "artifact").facts
    assert facts["sft/train"]["num_sequences"] + facts["sft/heldout"]["num_sequences"] == 20
    assert facts["labeled_answers/train"]["num_rows"] % 2 == 0


@pytest.mark.parametrize(("record", "problem"), [
    ({"prompt": "Q", "chosen": "A"}, "bad.jsonl:1: a record of type preference needs the field 'rejected'"),
    ({"question": "Say it", "answer": "It is yes"}, "dpo: no preference pair is left to train on"),
])  # fmt: skip
def test_bad_pairs_are_named(
    record: dict[str, str], problem: str, inside: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (tmp_path / "bad.jsonl").write_text(json.dumps(record))
    words = ["--init-from", "my-model", "--data.sources", str(tmp_path / "bad.jsonl"), "--stages", "clean,pack,dpo"]
    done = run_here(inside, ["run", "tiny", "--run-dir", str(tmp_path / "run"), *words])
    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.slow
def test_a_reference_with_another_vocabulary_is_refused(
    inside: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    save_model(make_decoder(vocab_size=100), tmp_path / "other")
    words = ["run", "tiny", "--init-from", "my-model", "--data.sources", "pairs.jsonl", "--stages", "clean,pack,dpo"]
    words += ["--run-dir", str(tmp_path / "run")]
    done = run_here(inside, [*words, f"--dpo.reference={tmp_path / 'other'}"])
    assert done.returncode == 2
    assert "dpo.reference: " in done.stderr
    assert "a vocabulary of 100" in done.stderr
    done = run_here(inside, [*words, f"--dpo.reference={tmp_path / 'none'}"])
    assert done.returncode == 2
    assert f"dpo.reference: {tmp_path / 'none'} is not a folder" in done.stderr


@pytest.mark.slow
def test_the_range_test_of_the_rate_packs_the_rows_of_the_stage(
    inside: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = [
        "lr-find",
        "tiny",
        "--init-from",
        "my-model",
        "--data.sources",
        "pairs.jsonl",
    ]
    words += ["--stages", "[clean,pack,dpo]", "--dpo.batch_tokens=256", "--steps", "20", "--out", str(tmp_path)]
    done = inside(*words, *SHORT)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "lr-find.json").read_text())["points"][0][1] == pytest.approx(math.log(2), abs=1e-5)


def test_the_page_names_every_metric_and_setting() -> None:
    for objective in (Preference, Kto, RewardModeling):
        assert [name for name in objective.metric_names if f"`{name}`" not in PAGE] == []
    shared = {one.name for one in fields(TrainConfig)} - {"learning_rate"}
    for stage, config in (("dpo", PreferenceConfig), ("kto", KtoConfig), ("reward", RewardModelConfig)):
        assert [
            one.name for one in fields(config) if one.name not in shared and f"`{stage}.{one.name}`" not in PAGE
        ] == []
