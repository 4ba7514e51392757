"""The page of symptoms, causes and commands is made of the texts that exist, and is current; its commands exist."""

import ast
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

import modelwright
from modelwright.cli.config import run_settings
from modelwright.cli.error_texts import (
    INSERTED,
    OPTION_CAUSE,
    SETTING_CAUSE,
    KnownError,
    cause_of,
    error_classes,
    known_errors,
)
from modelwright.cli.main import main
from modelwright.cli.remedies import (
    USUAL_OF_CLASS,
    USUAL_OF_PACKAGE,
    command_options,
    commands_of,
    explained,
    named_commands,
    option_commands,
)
from modelwright.cli.troubleshooting import markdown, monitors
from modelwright.continual.drift.features import ALARMS, EMBEDDING, FEATURES
from modelwright.pipeline.report.watch import EVENT_KINDS
from modelwright.pipeline.stages.specs import stage_names
from modelwright.serve.ab.guards import GUARDS, REASONS
from modelwright.serve.engine_client import ENGINE_LOSSES, EngineEnd
from modelwright.serve.engine_health import EJECTIONS, EjectionReason

ROOT = Path(__file__).parents[2]
PACKAGE = Path(modelwright.__file__).parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SETTINGS = [setting.key for setting in run_settings()]


def test_the_page_is_current() -> None:
    """python -m modelwright.cli.troubleshooting > docs/troubleshooting.md"""
    assert (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8") == markdown()


def rows_of_page() -> list[list[str]]:
    """The cells of every row but headers and rules."""
    lines = [line for line in markdown().splitlines() if line.startswith("| ")]
    rows = [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]
    return [row for row in rows if row[0] not in ("symptom", "---")]


def test_every_row_has_a_cause_and_a_command() -> None:
    rows = rows_of_page()
    assert len(rows) > 500
    assert {len(row) for row in rows} == {4}
    assert [row for row in rows if not all(cell.strip() for cell in row[1:])] == []


def problem(command: str) -> str:
    """What does not exist of a command on the page, "" if all of it does."""
    words = shlex.split(command)
    match words:
        case ["pip", "install", "-e", path]:
            return "" if (ROOT / path).is_dir() else path
        case ["pip", "install", package]:
            named = re.fullmatch(r"modelwright\[([\w,-]+)\]", package)
            return "" if named and set(named[1].split(",")) <= EXTRAS.keys() else package
        case ["python", "-m", module, *_]:
            return "" if find_spec(module) else module
        case ["modelwright", "explain", key]:
            return "" if any(f".{one}".endswith(f".{key}") for one in SETTINGS) else key
        case ["modelwright", *rest]:
            lower = [word for word in rest if word[0].islower()]
            path = next((one for n in (2, 1) if (one := " ".join(rest[:n])) in command_options()), "")
            stages = rest[rest.index("--stages") + 1].split(",") if "--stages" in rest else []
            unknown = {word for word in rest if word.startswith("--")} - command_options().get(path, frozenset())
            left = set(lower) - set(path.split()) - set(stages)
            return "" if path and not unknown and not left and set(stages) <= set(stage_names()) else command
    return command


@pytest.mark.parametrize(
    "command",
    ["modelwright config explain x", "modelwright serve --int", "modelwright export writes", "pip install modelwright",
     "modelwright explain pretrain.learning_rates", "modelwright run RUN --stages pick",
     "python -m modelwright.nothing"],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert problem(command)


def test_every_command_option_and_setting_of_the_page_exists() -> None:
    commands = {command for row in rows_of_page() for command in re.findall(r"`([^`]+)`", row[-1])}
    assert len(commands) > 100
    assert {command: what for command in commands if (what := problem(command))} == {}


def test_the_usual_commands_exist() -> None:
    assert set(USUAL_OF_PACKAGE.values()) <= command_options().keys()
    assert all((PACKAGE / place).exists() or (PACKAGE / f"{place}.py").exists() for place in USUAL_OF_PACKAGE)
    errors = ast.parse((PACKAGE / "core/errors.py").read_text(encoding="utf-8"))
    assert set(USUAL_OF_CLASS) <= error_classes([errors]).keys()


def test_options_are_named_whole_and_belong_to_their_command() -> None:
    assert option_commands("--int8: has no form", home="export") == ["modelwright export --help"]
    assert option_commands("leave out --bursts and --down-s") == ["modelwright plan spot --help"]
    assert option_commands("add --server URL, or --run-dir") == ["modelwright continual run --help"]
    assert option_commands("start it with --requests.ab_state FILE") == ["modelwright explain requests.ab_state"]
    assert option_commands("no option, a--b, --unknown-one") == []


def test_commands_are_taken_from_texts_as_far_as_they_exist() -> None:
    assert named_commands("as modelwright export writes it") == ["modelwright export"]
    assert named_commands("use modelwright drift check, or modelwright report RUN") == [
        "modelwright drift check", "modelwright report RUN",
    ]  # fmt: skip
    assert named_commands("torch was imported before modelwright and has not seen it") == []
    assert named_commands("pip install 'modelwright[hf]', pip install modelwright[otel], or leave it") == [
        "pip install 'modelwright[hf]'", "pip install modelwright[otel]",
    ]  # fmt: skip
    assert named_commands(f"pip install 'modelwright[{INSERTED}]'") == []


def error_of(module: str, text: str, kind: str = "ConfigError", owner: str = "", function: str = "") -> KnownError:
    symptom, _, remedy = text.rpartition("; ")
    return KnownError(
        module=module, kind=kind, owner=owner, function=function, symptom=symptom, remedy=remedy, cause=""
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (error_of("data/cache/config", "folder: is empty; name one", owner="RowCacheConfig"),
         "modelwright explain cache.folder"),
        (error_of("pipeline/stages/pack", "pack.mode: images have no length; choose another"),
         "modelwright explain pack.mode"),
        (error_of("pipeline/stages/student", f"{INSERTED}.teacher: has another tokenizer; choose one"),
         "modelwright explain student.teacher"),
        (error_of("plan/cost/workload", "name: … is used more than once; rename one"), "modelwright plan cost --help"),
        (error_of("data/shards", "…: is truncated; run the pack stage again", kind="ArtifactError"),
         "modelwright run RUN --stages pack"),
        (error_of("core/artifacts", "…: is damaged; run its stage again", kind="ArtifactError"), "modelwright run RUN"),
        (error_of("core/errors", "…: the disk is full; free some space", kind="StorageError"), "modelwright doctor"),
        (error_of("continual/drift/watch", "…: was lost; wait", kind="DataError"), "modelwright drift check --help"),
        (error_of("cli/export", "--int8: has no form; export to onnx", function="export"),
         "modelwright export --help"),
        (error_of("compress/int8", "backend: this PyTorch has none; choose another"),
         "modelwright explain serve.int8.backend"),
        (error_of("parallel/config", "ranks are lost; give more"), "modelwright config RUN"),
    ],
)  # fmt: skip
def test_the_command_of_an_error(error: KnownError, command: str) -> None:
    assert commands_of(error) == [command]


def test_causes_come_from_the_text_the_docstring_and_the_class() -> None:
    classes = {"ConfigError": "A value is out of range; the text starts with its path.", "DataError": ""}
    doc = "Read it. Raises `DataError` for a file that is gone, `ConfigError` if the folder is\n    empty."
    assert cause_of("ConfigError", "x: is missing, because it was never made", doc, classes) == "It was never made."
    assert cause_of("ConfigError", "x: is missing", doc, classes) == "The folder is empty."
    assert cause_of("DataError", "x: is missing", doc, classes) == "A file that is gone."
    assert cause_of("ConfigError", "it is missing", "", classes) == "A value is out of range."
    assert cause_of("ConfigError", "x.y: is missing", "", classes) == SETTING_CAUSE
    assert cause_of("ConfigError", "--x-y: is missing", "", classes) == OPTION_CAUSE
    assert cause_of("ConfigError", "it is missing", "Raises `ConfigError` if none is.", classes) == (
        "A value is out of range."
    ), "a clause of two words says nothing"


def reported_kinds() -> set[str]:
    """The kinds with which monitors and techniques report events: the second argument of each call of `report`."""
    kinds: set[str] = set()
    for path in (PACKAGE / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) >= 4:
                kind = node.args[1]
                if node.func.attr in ("report", "_judge") and isinstance(kind, ast.Constant):
                    kinds.add(kind.value)
    return kinds


def test_every_kind_of_event_has_its_advice() -> None:
    from modelwright.train.monitors.anomalies import SKIPPED

    kinds = reported_kinds() | {kind for kind, _ in SKIPPED.values()}
    assert {"straggler", "rollback", "loss_spike", "data_stall", "out_of_memory"} <= kinds
    assert kinds == set(EVENT_KINDS)


def test_the_alarms_of_all_monitors_are_on_the_page() -> None:
    assert set(ALARMS) == {*(feature.name for feature in FEATURES), EMBEDDING}
    assert set(REASONS) == {*GUARDS, "sample_ratio"}
    assert set(ENGINE_LOSSES) == {*get_args(EngineEnd)} - {"stopped"}
    assert set(EJECTIONS) == {*get_args(EjectionReason)}
    shown = {name for _, _, kinds, _ in monitors() for name in kinds}
    assert shown == {*EVENT_KINDS, *ALARMS, *REASONS, *ENGINE_LOSSES, *EJECTIONS}
    on_page = {row[1] for row in rows_of_page()}
    assert {f"`{name}`" for name in shown} <= on_page


def test_errors_are_found_with_those_that_derive_from_others() -> None:
    source = "class A(ModelwrightError): 'One.'\nclass B(A, ValueError): pass\nclass C(Exception): pass"
    assert error_classes([ast.parse(source)]) == {"ModelwrightError": "", "A": "One.", "B": ""}


def test_an_error_that_a_user_meets_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["lr-find", "tiny", "--out", str(tmp_path / "file")]) == 2
    line = capsys.readouterr().err.strip().removeprefix("modelwright: ")
    fitting = [
        error
        for error in known_errors()
        if re.fullmatch(re.escape(error.text).replace(INSERTED, ".+"), line) and error.symptom != INSERTED
    ]
    assert any(
        error.symptom == f"--out: {INSERTED} is a file" and commands_of(error) == ["modelwright lr-find --help"]
        for error in fitting
    )


def test_settings_in_advice_become_commands() -> None:
    assert explained("lower learning_rate (precision.policy)") == [
        "modelwright explain pretrain.learning_rate",
        "modelwright explain training.precision.policy",
    ]
    assert explained("look at the disk and at other_processes") == []
