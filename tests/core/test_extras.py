"""The core's few dependencies, and what is said about those that an extra brings."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from modelwright.core import config as extras
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, load_yaml, parse
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.pipeline.run import check_request
from modelwright.recipes.load import RECIPES, recipe

ROOT = Path(__file__).parents[2]
packages_distributions = cache(metadata.packages_distributions)  # which reads the files of everything installed
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> set[str]:
    """Distributions that an extra brings, those of the extras that it names included."""
    found = set[str]()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name = re.match(r"[\w.-]+", requirement)[0].lower()
        others = re.findall(r"modelwright\[([\w,-]+)\]", requirement)
        found |= set().union(*map(requirements, others[0].split(","))) if others else {name}
    return found


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Some extras, or all of the list, are not installed."""
    hidden = {module for name in names or extras.EXTRA_MODULES for module in extras.EXTRA_MODULES[name]}
    find_spec = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module in hidden else find_spec(module))


def test_the_core_has_few_dependencies() -> None:
    assert len(PROJECT["dependencies"]) <= 14


@pytest.mark.parametrize("name", extras.EXTRA_MODULES)
def test_an_extra_brings_its_modules(name: str) -> None:
    brought = {re.sub(r"[-_.]+", "-", one) for one in requirements(name)}
    owners = packages_distributions()
    for module in extras.EXTRA_MODULES[name]:
        distributions = {re.sub(r"[-_.]+", "-", one).lower() for one in owners.get(module, ())}
        assert not distributions or distributions & brought, f"{module} is not a part of {name}"
        assert extras.is_installed(name) or not distributions


def test_all_is_every_extra_that_needs_no_gpu() -> None:
    named = set(",".join(re.findall(r"\[([\w,-]+)\]", " ".join(PROJECT["optional-dependencies"]["all"]))).split(","))
    assert named == set(PROJECT["optional-dependencies"]) - {"all", "dev", "docs", "fp8", "peers", "ray-serve", "vllm"}


def test_several_extras_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "serve", "clean")
    with pytest.raises(ConfigError) as caught:
        extras.require({"clean.format.html": "clean", "tracking": "tensorboard", "serve_check": "serve"})
    assert (caught.value.key, caught.value.code) == ("clean.format.html", "missing")
    assert str(caught.value).endswith("(as does serve_check); pip install 'modelwright[clean,serve]'")
    extras.require({"tracking": "tensorboard"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "clean.format.html"),
        ({"format": {"html": "keep"}}, "clean.duplicates.near"),
        ({"format": {"html": "keep"}, "duplicates": {"near": False}}, "clean.privacy.replace"),
        ({"quality": {"languages": ["en"]}, "format": {"html": "keep"}}, "clean.quality.languages"),
        ({"noise": {"trusted": ["x"]}, "format": {"html": "keep"}}, "clean.noise.trusted"),
    ],
)
def test_a_step_without_its_libraries_is_refused(monkeypatch: pytest.MonkeyPatch, settings: dict, key: str) -> None:
    config = parse(CleanConfig, settings)
    assert build_steps(config)
    without(monkeypatch, "clean")
    with pytest.raises(ConfigError) as caught:
        build_steps(parse(CleanConfig, settings))
    assert (caught.value.key, caught.value.code) == (key, "missing")


def test_a_run_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch)
    run = RunDir(tmp_path / "run")
    for name, lacks in {"quickstart": "[clean,serve]", "vision": "[clean,images]"}.items():
        with pytest.raises(ConfigError, match=re.escape(lacks)):
            check_request(recipe(name), run, (), num_processes=1)
    check_request(recipe("tiny"), run, (), num_processes=1)
    assert not run.path.exists()


@pytest.mark.parametrize("name", ["tiny", "finetune"])
def test_the_smallest_recipe_and_finetuning_need_no_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    settings = load_yaml(RECIPES[name])
    config = parse(CleanConfig, settings["clean"])
    without(monkeypatch)
    assert build_steps(config)
    assert {"serve_check", "align", "vision"}.isdisjoint(settings["stages"])


def test_no_module_of_an_extra_is_imported_by_the_commands() -> None:
    """In a process that cannot find what the extras bring: everything that a run, a fine-tuning or a chat imports. Nor
    is TorchDynamo, which only compilation needs: it takes 2 s and 75 MB of each process.
    """
    names = [
        "cli.main", "recipes.models", "pipeline.run", "pipeline.stages.specs", "pipeline.exports",
        "pipeline.harness", "serve.config", "serve.terminal", "data.augment.augmenter", "objectives.grpo",
    ]  # fmt: skip
    code = (
        "import importlib, json, sys; from without_extras import hide_extras; hide_extras()\n"
        f"for name in {names}: importlib.import_module(f'modelwright.{{name}}')\n"
        "print(json.dumps(sorted({'.'.join(name.split('.')[:1 + name.startswith('torch.')]) for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n{code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    optional = {module for modules in extras.EXTRA_MODULES.values() for module in modules} - {"huggingface_hub"}
    assert not {"torch._dynamo", *optional} & set(json.loads(done.stdout))


def test_the_modules_of_extras_are_imported_where_they_are_used() -> None:
    """At the top of a module only in the packages that nothing of the core imports: the server's."""
    optional = {module for name in extras.EXTRA_MODULES for module in extras.EXTRA_MODULES[name]}
    found = {
        path.relative_to(ROOT / "src/modelwright").as_posix()
        for path in (ROOT / "src/modelwright").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.partition(".")[0] in optional
    }
    assert {name.partition("/")[0] for name in found} <= {"serve", "data"}
    assert {name for name in found if name.startswith("data")} == {"data/sources/web_archives.py"}


def required(requirement: str) -> tuple[str, str]:
    """Name and versions of a requirement, as the lock has them."""
    name, _, versions = re.match(r"([\w.-]+)(\[[^\]]*\])?([^;]*)", requirement).groups()
    return re.sub(r"[-_.]+", "-", name).lower(), ",".join(sorted(versions.strip().split(",")))


def test_no_extra_needs_another_version_than_the_constraints_have() -> None:
    """The lock has several versions of a package where extras disagree, which pip with constraints cannot install."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    locked: dict[str, set[str]] = {}
    for one in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(one["name"], set()).add(one.get("version", ""))
    by_python_or_system = {"contourpy", "llguidance", "networkx", "numpy", "pymdown-extensions", "setuptools", "torch"}
    assert {name for name in pins if len(locked.get(name, ())) > 1} <= by_python_or_system


def test_the_lock_belongs_to_the_projects() -> None:
    """Every requirement of the projects, with its versions, is one of uv.lock's, and no other: else run `uv lock`."""
    text = (ROOT / "uv.lock").read_text()
    locked = {one["name"]: one for one in tomllib.loads(text)["package"]}
    for path in (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        optional = project.get("optional-dependencies", {}).values()
        asked = {required(one) for group in (project["dependencies"], *optional) for one in group}
        entries = locked[project["name"]]["metadata"]["requires-dist"]
        found = {(one["name"], ",".join(sorted(one.get("specifier", "").split(",")))) for one in entries}
        assert {one for one in found if one[0] != "modelwright"} == {one for one in asked if one[0] != "modelwright"}
    hosts = set(re.findall(r"https?://([^/\"]+)", text))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}, "the public index, whatever index it was made with"
