"""A run has the sections of its own stages, and nothing else."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from modelwright.core.artifacts import save_yaml
from modelwright.core.config import dump, load_yaml
from modelwright.pipeline.run_config import left_out, parse_run
from modelwright.pipeline.stages.pretrain import PRETRAIN
from modelwright.pipeline.stages.sft import SFT
from modelwright.recipes.load import RECIPES, load
from modelwright.train.config import TrainConfig
from refusals import config_error

Command = Callable[..., subprocess.CompletedProcess[str]]
MODEL = {"vocab_size": 12_288, "num_layers": 2, "model_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
         "ffn_dim": 128, "max_seq_len": 512}  # fmt: skip
FINE_TUNING = {"name": "mine", "model": MODEL, "init_from": "some/model", "stages": ["clean", "pack", "sft"],
               "sft": {"num_steps": 5}}  # fmt: skip


def test_a_run_that_only_fine_tunes_has_no_section_for_pretraining() -> None:
    config = parse_run(FINE_TUNING)
    assert set(config.sections) == {"clean", "pack", "sft"}
    assert [stage.name for stage in config.stages] == ["init", "clean", "pack", "sft"]
    assert config.first_training is config.section(SFT)
    plain = dump(config)
    assert plain["stages"] == FINE_TUNING["stages"]
    assert "pretrain" not in plain
    assert parse_run(plain) == config


def test_a_training_is_one_pass_over_the_data_by_default() -> None:
    config = parse_run({"name": "mine", "model": MODEL, "pack": {"seq_len": 512}})
    assert config.section(PRETRAIN) == TrainConfig()
    assert TrainConfig().resolve_num_steps(17) == 17


def test_a_stage_may_read_the_section_of_another_one() -> None:
    """quantize measures as evaluate does, in a run without evaluate, too."""
    stages = ["clean", "pack", "sft", "quantize"]
    config = parse_run({**FINE_TUNING, "stages": stages, "evaluate": {"max_bytes_per_domain": 77}})
    assert config.section("evaluate").max_bytes_per_domain == 77


def test_trainings_share_the_section_rollout_and_may_have_their_own() -> None:
    """A run has it with the first stage that reads it; its file names only what differs."""
    stages = [*FINE_TUNING["stages"], "grpo", "ppo", "distill"]
    given = {**FINE_TUNING, "stages": stages, "rollout": {"max_completion_length": 31}, "student": {"num_layers": 1}}
    stages.insert(stages.index("distill"), "student")
    config = parse_run({**given, "ppo": {"rollout": {"mask_truncated": True}}})
    limits = {name: config.section(name).rollout.max_completion_length for name in ("grpo", "ppo", "distill")}
    assert limits == dict.fromkeys(limits, 31)
    assert [config.section(name).rollout.mask_truncated for name in limits] == [False, True, False]
    plain = dump(config)
    assert plain["rollout"]["max_completion_length"] == 31
    assert "rollout" not in plain["grpo"]
    assert plain["ppo"]["rollout"] == {"mask_truncated": True}
    assert parse_run(plain) == config
    with config_error("rollout.max_completion_length"):
        parse_run({**given, "rollout": {"max_completion_length": 0}})


def test_a_shared_section_that_no_stage_reads_is_checked_and_ignored() -> None:
    other = {**FINE_TUNING, "vision_tower": {"image_size": 64}}
    assert parse_run(other) == parse_run(FINE_TUNING)
    assert left_out(other, parse_run(other)) == ["vision_tower"]
    with config_error("vision_tower.patch_size"):
        parse_run({**FINE_TUNING, "vision_tower": {"patch_size": 5}})


def test_an_unknown_section_names_the_nearest() -> None:
    with config_error("sfd", "unknown"):
        parse_run({**FINE_TUNING, "sfd": {}})


def test_the_section_of_a_stage_that_is_left_out_is_checked_and_ignored(inside: Command, tmp_path: Path) -> None:
    assert parse_run({**FINE_TUNING, "pretrain": {"num_steps": 3}}) == parse_run(FINE_TUNING)
    with config_error("pretrain.num_stepz", "unknown"):
        parse_run({**FINE_TUNING, "pretrain": {"num_stepz": 3}})
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"recipe": "tiny", "stages": ["clean"], "sft": {"num_steps": 3}})
    )
    assert load(str(tmp_path / "mine.yaml"), {}).notes == ["sft: ignored, because the run has no such stage"]
    part = load("tiny", {"sft": {"num_steps": 3}}, str(tmp_path / "run"), ("clean",))
    assert part.notes == [], "--stages works on a part of a run on purpose"
    words = ("run", str(tmp_path / "mine.yaml"), "--run-dir", str(tmp_path / "run"))
    done = inside(*words, "--dry-run")
    assert done.stdout.splitlines()[-1] == "sft: ignored, because the run has no such stage"


def test_a_stage_that_is_added_to_a_run_says_whose_settings_it_takes(tmp_path: Path) -> None:
    part = ("clean", "tokenize", "pack")
    save_yaml(tmp_path / "config.yaml", parse_run({**load_yaml(RECIPES["tiny"]), "stages": part}))
    added = load(str(tmp_path), {}, only=("pretrain",))
    assert added.config.section("pretrain").num_steps == 0
    assert [note.partition(":")[0] for note in added.notes] == ["pretrain"]
    again = load("tiny", {}, str(tmp_path), ("pretrain",))
    assert (again.config.section("pretrain").num_steps, again.notes) == (40, [])
    assert load(str(tmp_path), {}, only=part).notes == []


def test_a_run_that_began_with_a_part_of_a_recipe_goes_on_with_its_settings(tmp_path: Path) -> None:
    """Also after it was worked on again in between, which writes its config.yaml anew."""
    for target, only in (("tiny", ("clean", "tokenize", "pack")), (str(tmp_path), ("clean",)), (str(tmp_path), ())):
        request = load(target, {}, str(tmp_path), only)
        assert request.notes == []
        save_yaml(tmp_path / "config.yaml", request.config)
    added = load(str(tmp_path), {}, only=("pretrain",))
    assert (added.config.section("pretrain").num_steps, added.notes) == (40, [])


def test_an_inherited_setting_of_a_stage_that_is_left_out_disturbs_nobody() -> None:
    shared = {"training": {"gradient_sync": {"local_sgd": {"sync_every_steps": 30}}}}
    own = {"pretrain": {"eval_every_steps": 300}, "stages": ["clean", "tokenize", "pack", "pretrain"]}
    config = load("quickstart", {**shared, **own}).config
    assert config.section("pretrain").gradient_sync.local_sgd.sync_every_steps == 30
