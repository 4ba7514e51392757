"""`modelwright config` and `modelwright explain`; what a stage inherits; the budget of settings."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from modelwright.cli.config import listed_settings, markdown
from modelwright.cli.main import main
from modelwright.core.config import dump
from modelwright.pipeline.run_config import parse_run
from modelwright.pipeline.stages.specs import known_stages
from modelwright.recipes.load import load, recipe
from refusals import config_error

ROOT = Path(__file__).parents[2]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_every_section_has_few_settings() -> None:
    """A stage's own section 20, what all training stages share 70, any other section 25: a page that somebody reads.
    What every training stage has counts where it is listed, with the first of them.
    """
    sections = Counter(setting.key.partition(".")[0] for setting in listed_settings() if "." in setting.key)
    most = {stage.name: 20 for stage in known_stages()} | {"training": 70}
    assert {name: count for name, count in sections.items() if count > most.get(name, 25)} == {}
    assert len(listed_settings()) - sections.total() <= 25  # of the run itself, in no section


def test_the_page_of_settings_is_current() -> None:
    """python -m modelwright.cli.config > docs/config.md"""
    assert (ROOT / "docs/config.md").read_text() == markdown()


@pytest.mark.parametrize("flags", [(), ("--plain",)])
def test_what_is_printed_is_the_configuration(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    text = printed(capsys, "config", "quickstart", *flags)
    assert ("# " in text) == (not flags)
    assert parse_run(yaml.safe_load(text)) == recipe("quickstart")


def test_a_difference_fits_one_screen_and_is_the_same_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "config", "quickstart", "--diff")
    assert len(text.splitlines()) <= 50
    (tmp_path / "quickstart.yaml").write_text(text)
    assert load(str(tmp_path / "quickstart.yaml"), {}).config == recipe("quickstart")


def test_one_key_reaches_every_training_stage_and_a_stage_may_differ() -> None:
    config = load("quickstart", {"training": {"precision": {"policy": "int8"}}}).config
    assert (config.section("pretrain").precision.policy, config.section("sft").precision.policy) == ("int8", "int8")
    assert "precision" not in dump(config)["sft"]
    shared = {"training": {"precision": {"policy": "int8"}}, "sft": {"precision": {"policy": "fp32"}}}
    mixed = load("quickstart", shared).config
    assert (mixed.section("pretrain").precision.policy, mixed.section("sft").precision.policy) == ("int8", "fp32")
    assert dump(mixed)["sft"]["precision"] == {"policy": "fp32"}
    assert parse_run(dump(mixed)) == mixed


def test_a_setting_of_a_stage_does_not_belong_to_all() -> None:
    with config_error("training.learning_rate", "unknown"):
        load("quickstart", {"training": {"learning_rate": 1e-3}})


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "explain", "precision.policy")
    assert text.startswith("training.precision.policy\n")
    assert "default: auto" in text
    assert "allowed: fp32, bf16_mixed, " in text
    assert "may set their own" in text
    assert printed(capsys, "explain", "precision.loss_scale").count("\n\n") == 3
    assert main(["explain", "pretrain.learning_rat"]) == 2
    assert "did you mean pretrain.learning_rate" in capsys.readouterr().err
