"""A plan as a SkyPilot task: valid by our schema and by SkyPilot's, and its machines install the source tree."""

import importlib
import re
import shlex
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

import modelwright
from modelwright.cli.main import main
from modelwright.core import resources
from modelwright.core.config import ConfigError
from modelwright_plan.spot import ENVIRONMENT, SkyTask, check_task
from refusals import config_error

ROOT = Path(__file__).parents[3]
WORDS = ["plan", "spot", "--work-hours", "4", "--stall-s", "5", "--recovery-s", "60", "--instance", "g5.xlarge"]
WORDS += ["--interruptions-per-hour", "0.2"]
TASK = ["--bucket", "my-runs"]


def sky_task(**changes: Any) -> dict[str, Any]:
    fields = {
        "name": "sft", "target": "quickstart", "is_file": False, "provider": "aws", "region": "us-east-1",
        "instance": "g5.xlarge", "num_nodes": 1, "bucket": "my-runs", "interval_s": 750.0, "falls_back": False,
    }  # fmt: skip
    return SkyTask(**{**fields, **changes}).plain()


def written_task(folder: Path, *words: str) -> dict[str, Any]:
    path = folder / "task.yaml"
    assert main([*WORDS, *TASK, "--skypilot", str(path), *words]) == 0
    return yaml.safe_load(path.read_text())


def test_a_task_is_checked() -> None:
    assert sky_task()["resources"]["use_spot"] is True
    assert sky_task(falls_back=True)["resources"]["ordered"] == [{"use_spot": True}, {"use_spot": False}]
    words = shlex.split(sky_task()["run"])
    assert words[:3] == [f"{ENVIRONMENT}/bin/modelwright", "run", "quickstart"]
    assert words[-2:] == ["--training.checkpoint_every_minutes", "12.5"]
    assert "--nnodes 4" in sky_task(num_nodes=4)["run"]
    with pytest.raises(ConfigError, match=r"file_mounts\./modelwright-runs\.name: 'My Runs' does not match"):
        sky_task(bucket="My Runs")
    with pytest.raises(ConfigError, match="'use_spots' was unexpected"):
        check_task({**sky_task(), "resources": {"infra": "aws", "instance_type": "x", "use_spots": True}})
    with pytest.raises(ConfigError, match=r"file_mounts\./x: 3 is not of type 'object'"):
        check_task({**sky_task(), "file_mounts": {"/x": 3}})


def test_the_machines_install_the_source_tree_with_its_pinned_versions(tmp_path: Path) -> None:
    task = written_task(tmp_path, "--target", "quickstart", "--extras", "images", "hf")
    assert Path(task["workdir"]) == ROOT
    make, install = map(shlex.split, task["setup"].splitlines())
    python = make[make.index("--python") + 1]
    assert make[-1] == ENVIRONMENT
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert tuple(map(int, python.split("."))) >= tuple(map(int, requires.removeprefix(">=").split(".")))
    assert install[install.index("-c") + 1] == "constraints.txt"
    assert (Path(task["workdir"]) / "constraints.txt").is_file()
    assert install[-1] == ".[clean,report,serve,tensorboard,images,hf]"


def test_an_extra_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--skypilot", str(tmp_path / "task.yaml"), "--target", "quickstart", "--extras", "imagse"]
    assert main([*WORDS, *TASK, *words]) == 2
    assert "--extras: 'imagse' is not an extra of the package; did you mean 'images'?" in capsys.readouterr().err


def test_a_file_is_taken_along_and_runs_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my run.yaml").write_text("recipe: tiny\nname: mine\n")
    task = written_task(tmp_path, "--target", "my run.yaml")
    assert task["name"] == "mine"
    words = shlex.split(task["run"])
    there = words[words.index("run") + 1]
    assert task["file_mounts"][there] == str(tmp_path / "my run.yaml")
    assert there.endswith("/my run.yaml")


def test_what_other_machines_lack_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    config = tmp_path / "mine.yaml"
    words = [*WORDS, *TASK, "--skypilot", str(tmp_path / "task.yaml"), "--target"]
    config.write_text(f"recipe: tiny\ndata: {{sources: [{tmp_path}/texts]}}\n")
    assert main([*words, str(config)]) == 2
    assert f"--target: data.sources: {tmp_path}/texts is on this machine" in capsys.readouterr().err
    assert main([*words, str(tmp_path)]) == 2
    assert f"--target: {tmp_path} is a folder; name a recipe or a YAML file" in capsys.readouterr().err
    assert not (tmp_path / "task.yaml").exists()
    config.write_text("recipe: tiny\ndata: {sources: ['s3://bucket/texts']}\n")
    assert main([*words, str(config)]) == 0


def test_without_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "__file__", str(tmp_path / "lib/site-packages/modelwright/core/resources.py"))
    with config_error("skypilot"):
        sky_task()


def test_nothing_installs_the_package_by_its_name() -> None:
    """Another project has that name on PyPI. Texts that name an extra are for who has the package."""
    by_name = re.compile(r"\binstall\b[^\n]*[\s\"']modelwright(?![\w\[/-])")
    assert by_name.search('"setup": "pip install modelwright\\n"')
    assert by_name.search('RUN pip install --no-cache-dir "modelwright==1.0"')
    package = Path(modelwright.__file__).parent
    found = {
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.*")
        if path.suffix in (".py", ".yaml", ".json", ".jinja", ".html")
        for match in by_name.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()
    for task in (sky_task(), sky_task(num_nodes=4), sky_task(extras=["images"])):
        assert not re.search(r"[\s\"']modelwright(?![\w/-])", task["setup"])


@pytest.mark.parametrize("changes", [{}, {"falls_back": True, "num_nodes": 4}, {"is_file": True, "target": __file__}])
def test_skypilot_itself_takes_the_task(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
        schemas = importlib.import_module("sky.utils.schemas")
        validate = importlib.import_module("sky.utils.common_utils").validate_schema
    task = sky_task(**changes)
    validate(task, schemas.get_task_schema(), "task: ")
    validate(task["resources"], schemas.get_resources_schema(), "resources: ")
    for mount in task["file_mounts"].values():
        if not isinstance(mount, str):
            validate(mount, schemas.get_storage_schema(), "storage: ")
    with pytest.raises(ValueError, match="work_dir"):
        validate({**task, "work_dir": "."}, schemas.get_task_schema(), "task: ")
