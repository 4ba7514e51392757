"""Workflows, templates, container and changelog: they name what exists, and their own checkers accept them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def run_checker(schema: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True)


def test_workflows_are_valid(tmp_path: Path) -> None:
    done = run_checker("vendor.github-workflows", *WORKFLOWS)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:"))
    assert run_checker("vendor.github-workflows", broken).returncode == 1


def test_workflows_call_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {name for path in WORKFLOWS for name in re.findall(r"\bmake ([\w-]+)", path.read_text())}
    assert called >= {"test", "test-slow", "test-all", "lint", "wheel-check", "gpu-check"}
    assert called <= targets


def test_every_supported_python_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={versions[0]}"


def test_issue_forms_have_unique_fields_and_the_labels_of_their_kind() -> None:
    assert len(TEMPLATES) == 2
    for path in TEMPLATES:
        form = yaml.safe_load(path.read_text())
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        assert form["labels"] == [path.stem]


def test_the_hook_for_subjects_refuses_long_ones(tmp_path: Path) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entry = next(hook["entry"] for hook in hooks if hook["id"] == "subject")
    message = tmp_path / "message"
    for length, code in ((72, 0), (73, 1)):
        message.write_text("x" * length + "\n\n" + "y" * 100)
        done = subprocess.run(f"{entry} {message}", shell=True, capture_output=True, text=True)
        assert done.returncode == code, done.stderr


def test_the_readme_is_short_and_shows_results_early() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert lines.index("## Results") < 30


def test_versions_agree() -> None:
    versions = {
        path.parent.name: tomllib.loads(path.read_text())["project"]["version"]
        for path in (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"))
    }
    assert len(set(versions.values())) == 1, versions
    (version,) = set(versions.values())
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version  # type: ignore[index]


DOCKERFILES = [ROOT / "Dockerfile", ROOT / "examples/deploy/Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=["root", "deploy"])
def test_hadolint_accepts_the_dockerfile(path: Path, tmp_path: Path) -> None:
    checker = Path(sys.executable).with_name("hadolint")
    command = [str(checker), "--config", str(ROOT / ".hadolint.yaml")]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    worse = tmp_path / "Dockerfile"
    worse.write_text(path.read_text() + "\nRUN cd /work && sudo pip install x\n")
    assert subprocess.run([*command, str(worse)], capture_output=True).returncode == 1


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", "")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_steps_of_the_dockerfile_make_a_working_command(tmp_path: Path) -> None:
    """Each COPY and RUN, as a script in a folder of its own. apt-get is replaced, and so is the download of what is
    installed here already: the environment sees this one's packages except for those of the project. For the same
    reason, and because each takes many seconds of a core, pip makes no environment to build each package in (`make
    wheel-check` does) and compiles no module before it is imported.
    """
    environment, build = tmp_path / "venv", tmp_path / "root"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    for path in map(Path, {*sys.path, next(p for p in sys.path if p.endswith("site-packages"))}):
        if path.name == "site-packages":
            (site / "outer.pth").write_text(f"{path}\n")
    stand_ins = {
        "apt-get": 'echo "$@" >> "$(dirname "$0")/apt.log"',
        "pip": 'command=$1; shift; exec python -m pip "$command" --no-build-isolation --no-compile "$@"',
    }
    for name, script in stand_ins.items():
        (environment / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (environment / "bin" / name).chmod(0o755)
    variables = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }
    for name, rest in instructions(ROOT / "Dockerfile"):
        if name == "ARG":
            variables.setdefault(*rest.split("=", 1))
        elif name == "COPY":
            *sources, target = rest.split()
            folder = build / target.strip("/")
            for source in map(ROOT.joinpath, sources):
                if source.is_dir():
                    kept = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", "build")
                    shutil.copytree(source, folder, ignore=kept)
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, folder)
        elif name == "RUN":
            script = rest.replace("/source", f"{build}/source").replace("/var/lib/apt", f"{build}/apt")
            if "--index-url" in script:  # torch is here; its index may not be reachable
                script = script.replace("--index-url", "--extra-index-url")
            done = subprocess.run(["sh", "-euc", script], env=variables, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "g++" in (environment / "bin/apt.log").read_text()
    assert not (build / "source").exists()  # removed, as its step says
    (_, entry), (_, default) = [one for one in instructions(ROOT / "Dockerfile") if one[0] in ("ENTRYPOINT", "CMD")]
    words = [*yaml.safe_load(entry), *yaml.safe_load(default)]
    shown = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert {"plan", "continual", "serve"} <= set(shown.stdout.split())
