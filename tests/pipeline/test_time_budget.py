"""`run --minutes N`: training as long as fits into the time budget of the run."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelwright.core.artifacts import RunDir, read_manifest, save_yaml
from modelwright.core.config import ConfigError, load_yaml
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.objectives.experience import RowPlan
from modelwright.pipeline.estimate import time_budget
from modelwright.pipeline.estimate.cost import TRAINING_OVERHEAD_S
from modelwright.pipeline.estimate.time_budget import (
    num_steps_within,
    step_seconds,
    time_plan,
    training_s,
    training_seconds,
    update_tokens,
    with_lengths,
)
from modelwright.pipeline.process_group import join_ranks
from modelwright.pipeline.resolve import resolve, resolve_inputs
from modelwright.pipeline.run_config import parse_run
from modelwright.pipeline.stage import Rates
from modelwright.recipes.load import load, recipe
from rank_processes import run_ranks
from refusals import config_error

TIMED_COMMAND = Path(__file__).with_name("timed_command.py")
STEP_S = 0.05
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_steps_and_validations_share_the_budget() -> None:
    config = recipe("tiny")
    sections = {
        "pretrain": replace(config.section("pretrain"), batch_tokens=2048, eval_every_steps=10),
        "sft": replace(config.section("sft"), batch_tokens=2048, eval_every_steps=0),
    }
    config = replace(config, validation_tokens=6144).with_sections(sections)
    steps = num_steps_within(config, 1000.0 + 2 * TRAINING_OVERHEAD_S, {"pretrain": 1.0, "sft": 2.0})
    assert steps == {"pretrain": int((900 - 1) / 1.1), "sft": int((100 - 2) / 2)}
    assert num_steps_within(config, 1000.0 + TRAINING_OVERHEAD_S, {"sft": 2.0}) == {"sft": 499}


def test_a_budget_that_is_too_small_says_how_much_is_needed() -> None:
    with config_error("minutes", match=r"minutes: 0\.5 are too few for 10 steps of sft .* give at least"):
        num_steps_within(replace(recipe("tiny"), minutes=0.5), 40.0, {"pretrain": 0.01, "sft": 1.0})


def test_completions_of_an_update_share_rows(tmp_path: Path) -> None:
    """The planned rows are those into which the objective packs completions of the allowed length."""
    config, run = recipe("arithmetic"), RunDir(tmp_path)
    (stage,) = (one for one in config.trainings if one.name == "grpo")
    training, seq_len = config.section(stage), config.section("pack").seq_len
    assert update_tokens(config, stage, run) == training.batch_tokens  # before prompts have been packed
    prompt_lens = torch.randint(3, 26, (training.batch_rows(seq_len),), generator=torch.Generator().manual_seed(5))
    sequences = (TokenSequence([7] * count + [1], [0] * count + [1]) for count in prompt_lens.tolist())
    folder = run.stage("pack").artifact / "prompts" / "train"
    pack(sequences, folder, PackConfig(seq_len=seq_len, mode="one_per_row"), vocab_size=263, eos_id=1)
    plan = RowPlan.of(prompt_lens + training.rollout.max_completion_length - 1, seq_len)
    assert update_tokens(config, stage, run) == plan.num_rows * seq_len < training.batch_tokens
    sft = config.trainings[1]
    assert update_tokens(config, sft, run) == config.section(sft).batch_tokens


@pytest.mark.parametrize("step_s", [4.9, 4.95, 5.0, 5.07])
def test_what_an_error_asks_for_is_enough(step_s: float) -> None:
    """Rounded to two digits, 2 minutes were too few and 2 the remedy."""
    config = replace(recipe("tiny"), minutes=2.0)
    rest_s = config.minutes * 60 - 80.0
    with pytest.raises(ConfigError) as raised:
        num_steps_within(config, 80.0, {"pretrain": step_s, "sft": 0.1})
    least = float(str(raised.value).partition("give at least ")[2].partition(",")[0])
    assert least > config.minutes
    enough = replace(config, minutes=least)
    assert num_steps_within(enough, least * 60 - rest_s, {"pretrain": step_s, "sft": 0.1})["pretrain"] >= 10


def test_what_is_fitted_takes_the_time_that_the_plan_names() -> None:
    """Updates with their validations; one update more would take more than there is."""
    config = replace(recipe("tiny"), validation_tokens=6144)
    seconds = {"pretrain": 1.0, "sft": 2.0}
    steps = num_steps_within(config, 1000.0 + 2 * TRAINING_OVERHEAD_S, seconds)
    for name, share in (("pretrain", 900.0), ("sft", 100.0)):
        assert training_s(config, name, steps[name], seconds[name]) <= share
        assert training_s(config, name, steps[name] + 1, seconds[name]) > share


def test_the_plan_says_how_the_time_is_spent(tmp_path: Path) -> None:
    config = replace(recipe("tiny"), minutes=3.0)
    rates = Rates(flops_per_s={"fp32": 1e11, "bf16": 1e11})
    words = time_plan(config, RunDir(tmp_path), rates, {"pretrain": 71.0})
    assert words.startswith("plan for 3 minutes: clean ")
    assert "pretrain 71 s, sft" in words
    assert [part.split()[0] for part in words.partition(": ")[2].split(", ")] == config.stage_names


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_length_is_measured_once_and_kept(small_words: Sequence[str], tmp_path: Path, num_processes: int) -> None:
    run = tmp_path / "run"
    words = [*small_words, "--run-dir", str(run), "--stages", "clean,tokenize,pack,pretrain"]
    (run / "time-budget").mkdir(parents=True)  # as a run leaves it that is killed while it times its steps
    (run / "time-budget" / "config.yaml").write_text("half a fi")
    run_ranks(TIMED_COMMAND, STEP_S, *words, "--minutes", "0.5", size=num_processes)
    config = load_yaml(run / "config.yaml")
    assert config["minutes"] == 0.5
    left_s = training_seconds(parse_run(config), RunDir(run), Rates(flops_per_s={"fp32": 1e11, "bf16": 1e11}))
    most = num_steps_within(parse_run(config), left_s, {"pretrain": STEP_S})["pretrain"]
    settings = config["pretrain"]
    assert (settings["num_tokens"], settings["num_epochs"]) == (0, 0.0)
    assert 10 <= settings["num_steps"] <= most, "timing the steps took a part of the time"
    assert not (run / "time-budget").exists()
    digest = read_manifest(run / "pretrain" / "artifact").content_digest
    run_ranks(TIMED_COMMAND, STEP_S, *words, "--minutes", "1", size=num_processes)
    assert load_yaml(run / "config.yaml") == config | {"minutes": 1.0}
    assert read_manifest(run / "pretrain" / "artifact").content_digest == digest


def test_the_plan_keeps_the_budget(
    inside: Command, small_words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "measured_rates", lambda config, precision, note: {"fp32": 1e11, "bf16": 1e11})
    words = [*small_words, "--run-dir", str(tmp_path / "run"), "--dry-run", "--validation_tokens", "512"]
    planned = {}
    for minutes in ("0", "5", "50"):
        done = inside(*words, "--minutes", minutes)
        assert done.returncode == 0, done.stderr
        table = done.stdout.partition("peak memory")[2].partition("total")[0]
        planned[minutes] = {line.split()[0]: line.split()[3:5] for line in table.splitlines() if line}
    # 10% of the budget is for fine-tuning, which takes 12 s outside of its updates
    assert planned["5"]["pretrain"] == ["4", "min"]
    assert 25 <= int(planned["5"]["sft"][0]) <= 42
    assert 42 <= int(planned["50"]["pretrain"][0]) <= 45
    assert planned["0"]["pretrain"][1] == "s"
    assert "plan for 50 minutes: clean" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_length_that_is_given_takes_the_place_of_the_time(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: tiny\nminutes: 7\n", encoding="utf-8")
    target = str(tmp_path / "mine.yaml")
    assert load(target, {}).config.minutes == 7
    assert load(target, {"pretrain": {"num_steps": 30}}).config.minutes == 0
    both = load(target, {"minutes": 3, "pretrain": {"num_steps": 30}}).config
    assert (both.minutes, both.section("pretrain").num_steps) == (3, 30)


def test_a_length_beside_minutes_on_the_command_line_is_named() -> None:
    (note,) = load("tiny", {"minutes": 3, "pretrain": {"num_steps": 30}}).notes
    assert note == "pretrain: minutes (3) decides the length, not the one given"
    assert not load("tiny", {"minutes": 0, "pretrain": {"num_steps": 30}}).notes


def test_a_length_of_a_stage_that_does_not_take_part_leaves_the_time(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: tiny\nminutes: 7\n", encoding="utf-8")
    target, run = str(tmp_path / "mine.yaml"), str(tmp_path / "run")
    request = load(target, {"dpo": {"num_steps": 30}}, run)
    assert request.config.minutes == 7
    assert "dpo: ignored, because the run has no such stage" in request.notes
    only = ["clean", "tokenize", "pack", "pretrain", "dpo"]
    assert load(target, {"dpo": {"num_steps": 30}}, run, only).config.minutes == 0


def test_a_length_of_one_training_leaves_those_that_were_measured_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: tiny\nminutes: 7\n", encoding="utf-8")
    target, run = str(tmp_path / "mine.yaml"), tmp_path / "run"
    created = resolve_inputs(with_lengths(load(target, {}).config, {"pretrain": 17, "sft": 11}))
    run.mkdir()
    save_yaml(run / "config.yaml", created)
    for overrides in ({"sft": {"num_steps": 50}}, {"sft": {"num_steps": 50}}):
        config = load(target, overrides, str(run)).config
        assert config.minutes == 0
        assert [config.section(name).num_steps for name in ("pretrain", "sft")] == [17, 50]
        assert config.section("sft").num_epochs == 0
        save_yaml(run / "config.yaml", config)
    of_another = load(target, {"sft": {"num_steps": 50}, "data": {"sources": ["arithmetic"]}}, str(run)).config
    assert of_another.section("pretrain").num_steps == recipe("tiny").section("pretrain").num_steps


def test_a_step_takes_as_long_as_the_median_of_those_that_were_timed(tmp_path: Path) -> None:
    """A positive time, of this machine."""
    config = resolve(recipe("tiny"), None, SilentProgress())
    with join_ranks(config, links=tmp_path / "links.json", num_rows=0) as ranks:
        assert ranks is not None
        assert step_seconds(config, config.trainings[0], tmp_path, ranks, SilentProgress()) > 0.0


@pytest.mark.parametrize("minutes", ["-1", "nan", "inf"])
def test_a_budget_is_a_number_above_0(inside: Command, tmp_path: Path, minutes: str) -> None:
    done = inside("run", "tiny", "--run-dir", str(tmp_path / "run"), "--minutes", minutes)
    assert done.returncode == 2
    assert re.search(r"minutes: (must be above 0|expected float)", done.stderr)
