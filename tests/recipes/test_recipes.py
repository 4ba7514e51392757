"""Golden resolved configurations: a change of a default is a change that somebody sees."""

import os
from pathlib import Path

import pytest
import yaml

from modelwright.core.config import ConfigError, dump
from modelwright.data.clean.config import build_steps
from modelwright.pipeline.run_config import parse_run
from modelwright.recipes.load import RECIPES, load, recipe
from refusals import config_error

GOLDEN = Path(__file__).parent / "golden"
NEEDS_MODEL = ("finetune",)
"""Recipes that start from a model folder, which a user names."""
WHOLE = sorted(set(RECIPES) - set(NEEDS_MODEL))


@pytest.mark.parametrize("name", WHOLE)
def test_golden(name: str) -> None:
    """After a deliberate change: MODELWRIGHT_WRITE_GOLDEN=1 pytest tests/recipes, and look at the difference."""
    text = yaml.safe_dump(dump(recipe(name)), sort_keys=False)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("MODELWRIGHT_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", WHOLE)
def test_a_printed_config_is_the_same_config(name: str) -> None:
    config = recipe(name)
    assert parse_run(yaml.safe_load(yaml.safe_dump(dump(config)))) == config


def test_quickstart_has_the_promised_size() -> None:
    assert 4_000_000 <= recipe("quickstart").model.num_parameters <= 6_000_000


def test_quickstart_cleans_with_all_steps_but_noise() -> None:
    """With the machine's own documentation as trusted text, the step `noise` cannot show its precision."""
    steps = [step.name for step in build_steps(recipe("quickstart").section("clean"))]
    assert [name for name in steps if name != "images"] == ["format", "quality", "duplicates", "privacy"]


def test_yaml_file_over_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: tiny\npretrain:\n  num_steps: 7\n")
    request = load(str(path), {"seed": 5})
    assert request.config.name == "mine"
    assert (request.config.section("pretrain").num_steps, request.config.seed) == (7, 5)
    assert request.run.path == Path("runs/mine")


def test_whole_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text(yaml.safe_dump(dump(recipe("tiny"))))
    assert load(str(path), {}, str(tmp_path / "there")).config == recipe("tiny")


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        ("tine", {}, "did you mean the recipe 'tiny'"),
        ("none.yaml", {}, r"none\.yaml: no such file"),
        ("tiny", {"pretrain": {"num_stepz": 1}}, r"pretrain\.num_stepz: unknown setting; did you mean 'num_steps'"),
        ("tiny", {"pack": {"seq_len": 4096}}, r"pack\.seq_len: 4096 is more than the model's context"),
        ("tiny", {"tokenizer": {"vocab_size": 5000}}, r"model\.vocab_size: 768 is less than"),
        ("tiny", {"pretrain": {"batch_tokens": 100}}, r"pretrain\.batch_tokens: 100 must be a multiple of 512"),
        ("tiny", {"stages": ["pack", "clean"]}, "must be in the pipeline's order: clean, pack"),
        ("tiny", {"stages": ["clean", "pack"]}, "pack needs tokenize; add it or start from a model folder"),
        ("tiny", {"stages": ["sft"]}, "sft needs pack"),
        ("tiny", {"stages": ["clean", "tokenize", "pack", "sft"]}, "sft needs pretrain"),
        ("tiny", {"stages": []}, "stages: is empty"),
        ("tiny", {"stages": ["clean", "wash"]}, "'wash' is not one of"),
        ("tiny", {"name": "a/b"}, "name: 'a/b'"),
        ("tiny", {"hardware": {"num_threads": -1}}, r"hardware\.num_threads"),
    ],
)
def test_mistakes_name_the_field_and_the_way_out(target: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(target, overrides)


def test_init_from_needs_neither_tokenizer_nor_pretraining() -> None:
    stages = ["clean", "pack", "sft", "evaluate"]
    config = load("tiny", {"init_from": "some/model", "stages": stages}).config
    assert config.model_names == ("init", "sft")


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ({"sft": {"num_steps": 10}}, (10, 0, 0.0)),
        ({"sft": {"num_tokens": "2M"}}, (0, 2_000_000, 0.0)),
        ({"sft": {"num_epochs": 3}}, (0, 0, 3.0)),
        ({"sft": {"learning_rate": 1e-3}}, (0, 0, 0.25)),
        ({"sft": {"num_steps": 0}}, (0, 0, 0.25)),
        ({"sft": {"num_steps": 10, "num_epochs": 0}}, (10, 0, 0.0)),
    ],
)
def test_the_length_that_is_given_last_wins(overrides: dict, lengths: tuple, tmp_path: Path) -> None:
    """Over the recipe, from a file and from the command line."""
    sft = load("quickstart", overrides).config.section("sft")
    assert (sft.num_steps, sft.num_tokens, sft.num_epochs) == lengths
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"recipe": "quickstart", **overrides}))
    sft = load(str(path), {}).config.section("sft")
    assert (sft.num_steps, sft.num_tokens, sft.num_epochs) == lengths
    assert load(str(path), {"sft": {"num_tokens": 512}}).config.section("sft").num_tokens == 512


@pytest.mark.parametrize("overrides", [{"num_steps": 10, "num_epochs": 2}, {"num_steps": 10, "num_tokens": "1K"}])
def test_two_lengths_at_one_level_are_refused(overrides: dict, tmp_path: Path) -> None:
    message = r"sft\.num_steps: at most one of the three lengths may be above 0 and none below, got num_steps=10"
    with pytest.raises(ConfigError, match=message):
        load("quickstart", {"sft": overrides})
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"recipe": "quickstart", "sft": overrides}))
    with pytest.raises(ConfigError, match=message):
        load(str(path), {})


def test_counts_take_prefixes() -> None:
    overrides = {"pretrain": {"batch_tokens": "2Ki"}, "data": {"max_record_bytes": "180MiB"}}
    config = load("tiny", overrides).config
    assert (config.section("pretrain").batch_tokens, config.data.max_record_bytes) == (2048, 180 * 2**20)
    with config_error(
        "pretrain.batch_tokens", match=r"pretrain\.batch_tokens: 2000100 must be .* nearest: 1999872 and 2000384"
    ):
        load("tiny", {"pretrain": {"batch_tokens": "2.0001M"}})


@pytest.mark.parametrize("name", NEEDS_MODEL)
def test_a_recipe_that_needs_a_model_says_so(name: str) -> None:
    with config_error("model", "missing"):
        recipe(name)
    with config_error("init_from"):
        load(name, {"init_from": "no/such"})
