"""The stages grpo and ppo of a whole run on a user's own records, and their sections of the report."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_rollouts
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, DataError
from modelwright.core.progress import SilentProgress
from modelwright.core.records import read_records
from modelwright.data.rows.examples import read_prompts
from modelwright.data.sources import corpora
from modelwright.data.sources.corpora import arithmetic_problems
from modelwright.objectives.rollouts import RolloutConfig
from modelwright.parallel.mesh import ParallelConfig, single
from modelwright.pipeline.estimate.time_budget import fit_to_minutes
from modelwright.pipeline.lr_find import RangeConfig, range_test
from modelwright.pipeline.process_group import RunGroup
from modelwright.pipeline.stage import Rates, RunConfig
from modelwright.pipeline.stages.ppo import value_model_start
from modelwright.pipeline.stages.rollout_training import build_terms, fitting, keep_completions
from modelwright.recipes.load import load, recipe
from refusals import config_error

SMALL = (
    "--stages=clean,tokenize,pack,pretrain,grpo,ppo,report", "--tokenizer.vocab_size=263", "--model.vocab_size=263",
    "--model.num_layers=1", "--model.model_dim=32", "--model.num_heads=2", "--model.num_kv_heads=1",
    "--model.head_dim=16", "--model.ffn_dim=32", "--model.max_seq_len=64", "--pack.seq_len=64",
    "--data.keep_fields=[level]", "--data.validation_fraction=0.2",
    "--pretrain.num_steps=2", "--pretrain.batch_tokens=256",
    "--grpo.num_steps=3", "--grpo.batch_tokens=512", "--grpo.num_generations=4", "--grpo.eval_every_steps=2",
    "--rollout.max_completion_length=6", "--grpo.beta=0.05",
    "--grpo.rewards={digits: {kind: pattern, pattern: '[0-9]+'}, length: {max_len: 4}}",
    "--ppo.num_steps=3", "--ppo.batch_tokens=512", "--ppo.num_ppo_epochs=2",
    "--ppo.rewards={length: {max_len: 4}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, dice = tmp_path_factory.mktemp("records") / "sums.jsonl", random.Random(3)
    pairs = {(dice.randint(0, 99), dice.randint(0, 99)) for _ in range(60)}
    lines = [{"question": f"{a} + {b} =", "answer": str(a + b), "level": len(str(a + b))} for a, b in sorted(pairs)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_run_learns_from_rewards_and_shows_it(
    inside: Callable[..., CompletedProcess[str]], records: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = inside("run", "tiny", "--data.sources", str(records), "--run-dir", str(run), *SMALL)
    assert ended.returncode == 0, ended.stderr
    train, heldout = (read_prompts(run / "pack" / "artifact" / "prompts" / split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == len(records.read_text().splitlines())
    assert set(train[0].fields) >= {"answer", "level"}
    assert train[0].fields["level"] == len(train[0].fields["answer"])
    grpo, ppo = (read_records(run / stage / "metrics.jsonl") for stage in ("grpo", "ppo"))
    updates = [record for record in grpo if "reward" in record]
    assert [record["step"] for record in updates] == [1, 2, 3]
    assert {"rewards/digits/mean", "rewards/length/std", "kl", "completions/mean_length"} <= set(updates[0])
    assert abs(updates[0]["kl"]) < 1e-6  # the policy is the reference before the first update
    assert [record["step"] for record in grpo if "heldout/reward" in record] == [2, 3]
    assert {"objective/kl", "objective/scores", "loss/value_avg", "policy/approxkl_avg"} <= set(ppo[0])
    page = (run / "report.html").read_text()
    for text in (
        "Held-out prompts",
        "Completions of the first rollout",
        "Completions of the last rollout",
        "Weight of the KL penalty",
    ):
        assert text in page
    assert not (run / "ppo" / "artifact" / "model.safetensors").read_bytes().count(b"heads.")


SHORT_PREFERENCE = (
    "--hardware.num_threads=1", "--model.num_layers=1", "--model.model_dim=32", "--model.num_heads=2",
    "--model.num_kv_heads=1", "--model.head_dim=16", "--model.ffn_dim=32", "--tokenizer.vocab_size=400",
    "--model.vocab_size=400", "--pretrain.num_steps=2", "--sft.num_steps=20", "--reward.num_steps=20",
    "--reward.learning_rate=3e-3", "--ppo.num_steps=6", "--ppo.batch_tokens=512", "--ppo.eval_every_steps=3",
    "--rollout.max_completion_length=24", "--ppo.value_model=reward", "--validation_tokens=1024",
)  # fmt: skip


@pytest.mark.slow
def test_the_recipe_preference_shows_what_pleasing_a_reward_model_costs(
    inside: Callable[..., CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "MODULES_FRACTION", 0.05)
    run = tmp_path / "run"
    ended = inside("run", "preference", "--run-dir", str(run), *SHORT_PREFERENCE)
    assert ended.returncode == 0, ended.stderr
    records = read_records(run / "ppo" / "metrics.jsonl")
    updates = [record for record in records if "reward" in record]
    for record in updates:  # the true reward is measured and not trained on
        assert record["reward"] == pytest.approx(record["rewards/reward_model/mean"])
        assert record["rewards/true_reward/mean"] != pytest.approx(record["reward"])
    heldout = [record for record in records if "heldout/reward" in record]
    assert [record["step"] for record in heldout] == [3, 6]
    assert all(0 <= record["heldout/rewards/true_reward/win_rate"] <= 1 for record in heldout)
    first = json.loads((run / "ppo" / "first-evaluation.json").read_text())
    assert {first[f"rewards/{name}/win_rate"] for name in ("reward_model", "true_reward")} == {0.5}
    (written,) = (run / "ppo" / "artifact").glob("*.safetensors")
    assert not written.read_bytes().count(b"heads.")
    page = (run / "report.html").read_text()
    for title in (
        "KL from the start, nats per completion",
        "Reward term reward_model",
        "Reward term true_reward",
        "Reward term true_reward against the KL from the start",
        "Share of completions that beat those of the start",
        "Mean length of completions, tokens",
        "sampled completions",
    ):
        assert title in page


def test_prompts_without_room_are_named() -> None:
    prompts, notes = tiny_rollouts.prompts(5), list[str]()
    longest = max(len(one.ids) for one in prompts)
    rollout = RolloutConfig(max_completion_length=8)
    assert len(fitting(prompts, longest + 8, rollout, "grpo", notes.append)) == 5
    assert not notes
    assert len(fitting(prompts, longest + 7, rollout, "grpo", notes.append)) == 4
    assert notes == [
        f"grpo: 1 of 5 prompts are too long and are left out; raise pack.seq_len ({longest + 7}) or lower "
        "rollout.max_completion_length"
    ]
    with pytest.raises(
        DataError, match=r"grpo: none of 5 prompts leaves room for 8 tokens in a row; raise pack\.seq_len"
    ):
        fitting(prompts, 8, rollout, "grpo", notes.append)


def test_the_first_and_the_newest_rollout_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    for number in range(3):
        keep_completions(path, number, [{"prompt": "p", "completion": str(number), "reward": 1.0}])
    assert [one["rollout"] for one in read_records(path)] == [0, 2]
    keep_completions(path, 0, [])
    assert read_records(path) == []


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_learning_rate_cannot_be_swept_on_rollouts(stage: str, tmp_path: Path) -> None:
    config = load("arithmetic", {"stages": ["clean", "pack", stage], "init_from": str(tmp_path)}).config
    with pytest.raises(ConfigError, match=f"stages: {stage} generates its training data, which lr-find does not"):
        range_test(config, RunDir(tmp_path), tmp_path, RangeConfig(), words=["lr-find"], progress=SilentProgress())


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_updates_on_rollouts_are_not_timed_before_the_run(stage: str, tmp_path: Path) -> None:
    config = load("arithmetic", {"stages": ["clean", "pack", stage], "init_from": str(tmp_path)}).config
    ranks = RunGroup(world=single("cpu"), layout=ParallelConfig())
    message = f"minutes: the updates of {stage} cannot be timed .* set minutes to 0, and {stage}.num_steps"
    with pytest.raises(ConfigError, match=message):
        fit_to_minutes(replace(config, minutes=5.0), RunDir(tmp_path), ranks, SilentProgress())


def test_generated_arithmetic_is_right_or_forgets_the_carry() -> None:
    documents = list(arithmetic_problems())
    assert documents == list(arithmetic_problems())
    assert len({document.text for document in documents}) == len(documents) > 3000
    splits = {document.meta["question"]: document.split for document in documents}
    assert all(splits[document.meta["question"]] == document.split for document in documents)
    assert len(splits) == len(documents) / 2
    for document in documents:
        question, answer, solution = (document.meta[name] for name in ("question", "answer", "solution"))
        assert str(eval(question)) == solution
        assert abs(int(answer) - int(solution)) in (0, 10)
    heldout = [document for document in documents if document.split == "heldout"]
    assert 0.05 < len(heldout) / len(documents) < 0.15


def test_what_scores_where_no_rewards_are_set_is_said() -> None:
    config, notes = recipe("arithmetic"), list[str]()
    config = config.with_sections({"grpo": replace(config.section("grpo"), rewards={})})
    inputs: Any = SimpleNamespace(config=config, parents={}, note=notes.append)
    assert [term.reward.name for term in build_terms(inputs, "grpo").terms] == ["exact_match"]
    assert notes == ["grpo: answers are scored by exact_match, because grpo.rewards is empty"]


def preference_with(**settings: Any) -> RunConfig:
    """The recipe with other settings of ppo."""
    config = recipe("preference")
    return config.with_sections({"ppo": replace(config.section("ppo"), **settings)})


def test_a_value_model_begins_with_the_reward_model_that_scores(tmp_path: Path) -> None:
    judges = {name: {"kind": "model", "path": str(tmp_path)} for name in "ab"}
    (ppo,) = (one for one in recipe("preference").stages if one.name == "ppo")
    for settings, start in (
        ({"value_model": "policy"}, "sft"),
        ({"value_model": "reward"}, "reward"),
        ({"value_model": "reward", "rewards": {**judges, "own": {"kind": "model"}}}, "reward"),
        ({"value_model": "reward", "rewards": judges}, tmp_path),
        ({"value_model": "reward", "rewards": {"length": {"max_len": 4}}}, "reward"),
    ):
        config = preference_with(**settings)
        assert value_model_start(config) == start
        assert ("reward" in ppo.needs(config)) == (start == "reward" or settings["value_model"] == "policy")
    judges["b"]["path"] = str(tmp_path.parent)
    with config_error("ppo.value_model"):
        ppo.needs(preference_with(value_model="reward", rewards=judges))


def test_a_run_without_a_reward_model_says_what_a_value_model_lacks() -> None:
    with config_error("stages", match="ppo needs reward"):
        load("preference", {"stages": ["clean", "tokenize", "pack", "pretrain", "sft", "ppo"],
                            "ppo": {"value_model": "reward", "rewards": {"length": {"max_len": 4}}}})  # fmt: skip


def test_the_plan_counts_a_value_model_with_gradients_and_states(tmp_path: Path) -> None:
    rates = Rates(flops_per_s={"fp32": 1e10, "bf16": 1e10})
    head, separate = (
        next(one for one in config.stages if one.name == "ppo").estimate(config, RunDir(tmp_path), rates)
        for config in (preference_with(), preference_with(value_model="reward"))
    )
    num_parameters = recipe("preference").model.num_parameters
    assert head.further_bytes == 2 * 4 * num_parameters  # the reference and the reward model
    assert separate.further_bytes - head.further_bytes > 4 * 4 * num_parameters
    assert separate.peak_bytes - head.peak_bytes == separate.further_bytes - head.further_bytes
    assert separate.flops > 1.5 * head.flops
