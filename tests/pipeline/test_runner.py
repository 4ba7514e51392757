"""The runner: what is skipped, what runs again, what a cut-off or a failure leaves behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core import artifacts
from modelwright.core.artifacts import ArtifactError, RunDir, read_attempts
from modelwright.core.config import ModelwrightError, Stopped
from modelwright.core.progress import SilentProgress
from modelwright.parallel.mesh import single
from modelwright.pipeline.runner import run_stages, survey
from modelwright.pipeline.stage import Stage, StageContext
from refusals import config_error


class Chain:
    """Three stages that write `<name>.txt` from their settings and their parents' files; counts what ran."""

    def __init__(self, **settings: str) -> None:
        self.settings = {"first": "1", "second": "2", "third": "3"} | settings
        self.ran: list[str] = []
        self.before: dict[str, Callable[[StageContext], None]] = {}

    def stages(self) -> list[Stage]:
        parents = {"first": (), "second": ("first",), "third": ("first", "second")}
        return [
            Stage(name=name, title=name, settings=value, parents=parents[name], run=self._run(name, value))
            for name, value in self.settings.items()
        ]

    def _run(self, name: str, value: str) -> Callable[[StageContext], None]:
        def run(context: StageContext) -> None:
            self.ran.append(name)
            self.before.get(name, lambda context: None)(context)
            inherited = [(folder / f"{parent}.txt").read_text() for parent, folder in context.parents.items()]
            (context.output.path / f"{name}.txt").write_text("".join([*inherited, value]))

        return run

    def go(self, run: RunDir, **options: object) -> list[str]:
        self.ran.clear()
        run_stages(run, self.stages(), ranks=single(), progress=SilentProgress(), **options)  # type: ignore[arg-type]
        return list(self.ran)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def result(run: RunDir) -> str:
    return (run.stage("third").artifact / "third.txt").read_text()


def test_everything_runs_once_then_nothing(run: RunDir) -> None:
    chain = Chain()
    assert chain.go(run) == ["first", "second", "third"]
    assert result(run) == "1123"
    assert chain.go(run) == []


def test_a_changed_setting_runs_only_what_depends_on_it(run: RunDir) -> None:
    Chain().go(run)
    assert Chain(second="x").go(run) == ["second", "third"]
    assert result(run) == "11x3"
    assert Chain(second="x", third="y").go(run) == ["third"]


def test_a_stage_made_again_with_the_same_content_spares_its_children(run: RunDir) -> None:
    Chain().go(run)
    (run.stage("first").artifact / "manifest.json").unlink()
    assert Chain().go(run) == ["first"]


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "cut", "1X"], ids=["missing", "another size", "another byte"])
def test_a_damaged_artifact_is_refused_until_it_is_removed(run: RunDir, content: str | None) -> None:
    Chain().go(run)
    artifact = run.stage("second").artifact
    file = artifact / "second.txt"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    for chain in (Chain(), Chain(third="x")):
        with pytest.raises(ArtifactError, match=rf"second\.txt: .*; remove {artifact} and run its stage again"):
            chain.go(run)
        assert chain.ran == []
    shutil.rmtree(artifact)
    assert Chain().go(run) == ["second"]


def test_a_damaged_artifact_of_other_settings_is_made_again(run: RunDir) -> None:
    Chain().go(run)
    (run.stage("second").artifact / "second.txt").unlink()
    assert Chain(second="x").go(run) == ["second", "third"]


def test_artifacts_of_this_invocation_are_not_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def damage(file: Path, num_bytes: int, checksum: str, *, verify: bool) -> str:
        read.extend([file.name] if verify else [])
        return ""

    monkeypatch.setattr(artifacts, "damage", damage)
    Chain().go(run)
    assert read == []
    Chain(third="x").go(run)
    assert read == ["first.txt", "second.txt"]


def test_a_cut_off_stage_keeps_its_folder_and_a_changed_one_starts_empty(run: RunDir) -> None:
    def stop(context: StageContext) -> None:
        seen.append(sorted(path.name for path in context.folder.checkpoints.glob("*")))
        context.folder.checkpoints.mkdir(exist_ok=True)
        (context.folder.checkpoints / "step").write_text("half way")
        raise Stopped("asked to stop")

    seen: list[list[str]] = []
    chain = Chain()
    chain.before["second"] = stop
    for _ in range(2):
        with pytest.raises(Stopped):
            chain.go(run)
    changed = Chain(second="other")
    changed.before["second"] = stop
    with pytest.raises(Stopped):
        changed.go(run)
    assert seen == [[], ["step"], []]
    assert not run.stage("second").artifact.exists()
    assert [entry["state"] for entry in read_attempts(run.stage("second"))] == ["stopped"]


def test_a_failure_leaves_no_artifact_and_is_written_down(run: RunDir) -> None:
    def fail(context: StageContext) -> None:
        (context.output.path / "half.txt").write_text("half")
        raise RuntimeError("a bug")

    chain = Chain()
    chain.before["second"] = fail
    with pytest.raises(RuntimeError):
        chain.go(run)
    folder = run.stage("second")
    assert sorted(path.name for path in folder.path.iterdir()) == ["log.txt", "stage.json"]
    assert "RuntimeError: a bug" in folder.log.read_text()
    assert read_attempts(folder)[0]["state"] == "failed"
    chain.before.clear()
    assert chain.go(run) == ["second", "third"]


def test_an_attempt_found_running_was_killed(run: RunDir) -> None:
    Chain().go(run)
    path = run.stage("third").path / "stage.json"
    journal = json.loads(path.read_text())
    journal["attempts"][0]["state"] = "running"
    path.write_text(json.dumps(journal))
    (run.stage("third").artifact / "manifest.json").unlink()
    Chain().go(run)
    assert [entry["state"] for entry in read_attempts(run.stage("third"))] == ["killed", "done"]


def test_only_the_named_stages_are_worked_on(run: RunDir) -> None:
    chain = Chain()
    with config_error("stages", match="first was never run and is needed; add first to --stages"):
        chain.go(run, only=("second",))
    assert chain.go(run, only=("first",)) == ["first"]
    assert chain.go(run, only=("second",)) == ["second"]
    with config_error("stages", match="second was made with other settings"):
        Chain(second="other").go(run, only=("third",))


def test_survey_changes_nothing(run: RunDir) -> None:
    assert survey(run, Chain().stages()).states == {"first": "new", "second": "new", "third": "new"}
    Chain().go(run)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    assert survey(run, Chain(second="x").stages()).states == {"first": "done", "second": "changed", "third": "changed"}
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_a_run_is_worked_on_by_one_process_at_a_time(run: RunDir) -> None:
    with run.lock(), pytest.raises(ModelwrightError, match="is working in this run"), run.lock():
        pass


def test_resources_are_recorded(run: RunDir) -> None:
    Chain().go(run)
    attempt = read_attempts(run.stage("first"))[0]
    assert attempt["wall_s"] > 0
    assert attempt["peak_bytes"] > 1_000_000
