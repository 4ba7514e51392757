"""`modelwright config` and `modelwright explain`; what a stage inherits; settings of earlier versions."""

from pathlib import Path

import pytest
import yaml

from modelwright.cli.config import markdown, run_settings
from modelwright.cli.main import main
from modelwright.core.config import dump, parse
from modelwright.core.errors import ConfigError
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.renamed import RENAMED
from modelwright.recipes.load import load, recipe

ROOT = Path(__file__).parents[2]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_a_run_has_few_settings() -> None:
    """200 without the preparation of data, which the first version of this limit hardly had."""
    keys = [setting.key for setting in run_settings()]
    prepares = [key for key in keys if key.startswith(("data.", "clean.", "augment."))]
    assert len(keys) - len(prepares) <= 190
    assert len(prepares) <= 60


def test_the_page_of_settings_is_current() -> None:
    """python -m modelwright.cli.config > docs/config.md"""
    assert (ROOT / "docs/config.md").read_text() == markdown()


@pytest.mark.parametrize("flags", [(), ("--plain",)])
def test_what_is_printed_is_the_configuration(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    text = printed(capsys, "config", "quickstart", *flags)
    assert ("# " in text) == (not flags)
    assert parse(RunConfig, yaml.safe_load(text)) == recipe("quickstart")


def test_a_difference_fits_one_screen_and_is_the_same_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "config", "quickstart", "--diff")
    assert len(text.splitlines()) <= 50
    (tmp_path / "quickstart.yaml").write_text(text)
    assert load(str(tmp_path / "quickstart.yaml"), {}).config == recipe("quickstart")


def test_one_key_reaches_every_training_stage_and_a_stage_may_differ() -> None:
    config = load("quickstart", {"training": {"precision": {"policy": "int8"}}}).config
    assert (config.pretrain.precision.policy, config.sft.precision.policy) == ("int8", "int8")
    assert "precision" not in dump(config)["sft"]
    shared = {"training": {"precision": {"policy": "int8"}}, "sft": {"precision": {"policy": "fp32"}}}
    mixed = load("quickstart", shared).config
    assert (mixed.pretrain.precision.policy, mixed.sft.precision.policy) == ("int8", "fp32")
    assert dump(mixed)["sft"]["precision"] == {"policy": "fp32"}
    assert parse(RunConfig, dump(mixed)) == mixed


def test_a_setting_of_a_stage_does_not_belong_to_all() -> None:
    with pytest.raises(ConfigError, match=r"^training\.learning_rate: unknown setting"):
        load("quickstart", {"training": {"learning_rate": 1e-3}})


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "explain", "precision.policy")
    assert text.startswith("training.precision.policy\n")
    assert "default: auto" in text
    assert "allowed: fp32, bf16_mixed, " in text
    assert "may set their own" in text
    assert printed(capsys, "explain", "gradient_sync.local_sgd").count("\n\n") == 4
    assert main(["explain", "pretrain.learning_rat"]) == 2
    assert "did you mean pretrain.learning_rate" in capsys.readouterr().err
    assert main(["explain", "pretrain.clip_norm"]) == 2
    assert "is now called pretrain.max_grad_norm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pretrain.transport.kind", "pretrain.gradient_sync.kind"),
        ("sft.num_microbatches", "sft.gradient_accumulation_steps"),
        ("pretrain.guards.stragglers.patience", "pretrain.fault_tolerance.stragglers"),
        ("serve.server.port", "serve"),
        ("parallel.shard", "parallel.zero_stage"),
    ],
)
def test_a_setting_of_an_earlier_version_names_the_present_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str
) -> None:
    assert main(["run", "tiny", f"--{old}", "1", "--dry-run"]) == 2
    assert f"--{old}: is now called {new}" in capsys.readouterr().err
    data: dict[str, object] = {}
    group = data
    *parents, last = old.split(".")
    for parent in parents:
        group = group.setdefault(parent, {})  # type: ignore[assignment]
    group[last] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"recipe": "tiny", **data}))
    assert main(["run", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
    assert f"is now called {new}" in capsys.readouterr().err


def test_a_value_of_an_earlier_version_names_the_present_one() -> None:
    with pytest.raises(ConfigError, match=r"pretrain\.optimizer: 'adamw_int8' is now called adamw_8bit"):
        load("tiny", {"pretrain": {"optimizer": "adamw_int8"}})


def test_no_present_setting_counts_as_renamed() -> None:
    present = {one.key for one in run_settings()}
    assert present.isdisjoint(RENAMED)
    assert all(not RunConfig.renamed(key) for key in present)


def test_a_run_of_an_earlier_version_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Wherever its configuration is read: to resume, to export, to serve."""
    run = tmp_path / "old"
    (run / "sft" / "artifact").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    plain = dump(recipe("tiny"))
    plain["pretrain"]["num_microbatches"] = plain["pretrain"].pop("gradient_accumulation_steps")
    (run / "config.yaml").write_text(yaml.safe_dump(plain))
    for words in (["run", str(run)], ["export", str(run), "--to", "hf", str(tmp_path / "hf")], ["serve", str(run)]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"{run}/config.yaml: pretrain.num_microbatches: is now called pretrain.gradient_acc" in said
        assert "made by an earlier version" in said
    assert not (tmp_path / "hf").exists()
