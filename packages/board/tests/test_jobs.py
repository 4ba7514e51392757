"""Commands outlive the board that has started them; another board recognizes them by their files."""

import os
import signal
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from board_runs import wait_for
from modelwright_board import jobs as jobs_module
from modelwright_board.jobs import Job, Jobs, plain_text, process_begin
from modelwright_board.runs import Runs
from modelwright_board.servers import Watch, interval_values, parse_metrics, quantile, server_jobs, total


def test_a_command_is_found_again_by_another_board(tmp_path: Path) -> None:
    first = Jobs(tmp_path)
    job = first.start(["clean", "nothing-there.jsonl", "--dry-run"], screen="data", action="look")
    assert os.getsid(job.pid) == job.pid != os.getsid(0)
    wait_for(lambda: first.get(job.id).state == "failed")  # type: ignore[union-attr]
    again = Jobs(tmp_path).get(job.id)
    assert again is not None
    assert (again.code, again.words) == (2, ["clean", "nothing-there.jsonl", "--dry-run"])
    assert "nothing-there.jsonl" in Jobs(tmp_path).output(again)


def test_a_command_is_stopped_and_a_reused_number_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_SHELL", "sleep 60")  # a process without an end of its own
    jobs = Jobs(tmp_path)
    job = jobs.start(["run"], screen="plan", action="recipe")
    assert jobs.get(job.id).is_alive  # type: ignore[union-attr]
    # The same number, but of a process that began at another time: it is not this job, and gets no signal.
    record = tmp_path / job.id / "job.json"
    record.write_text(record.read_text().replace(f'"begun": "{job.begun}"', '"begun": "1"'))
    other = Jobs(tmp_path).get(job.id)
    assert other is not None
    assert other.state == "killed"
    assert not jobs.stop(other)
    assert process_begin(job.pid) == job.begun
    record.write_text(record.read_text().replace('"begun": "1"', f'"begun": "{job.begun}"'))
    assert jobs.stop(Jobs(tmp_path).get(job.id))  # type: ignore[arg-type]
    wait_for(lambda: not jobs.get(job.id).is_alive)  # type: ignore[union-attr]


def test_a_server_is_one_whichever_page_has_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_SHELL", "sleep 60")
    jobs = Jobs(tmp_path)
    servers = [jobs.start(["serve", "m", "--port", "1"], screen=screen, action="serve") for screen in ("talk", "serve")]
    other = jobs.start(["run", "serve"], screen="plan", action="recipe")
    try:
        assert {job.id for job in server_jobs(jobs)} == {job.id for job in servers}
    finally:
        for job in (*servers, other):
            jobs.stop(jobs.get(job.id))  # type: ignore[arg-type]
            jobs._children[job.id].wait(30)


@pytest.mark.parametrize("name", ["..", "../../etc", "20261128-000000-zzzzzz", "", "a\0b"])
def test_only_names_of_jobs_are_looked_up(tmp_path: Path, name: str) -> None:
    assert Jobs(tmp_path).get(name) is None


def test_output_is_what_a_terminal_would_leave() -> None:
    assert plain_text("\x1b[31mred\x1b[0m\n10%\r20%\r100%\r\nend\x07") == "red\n100%\nend"


def test_a_lock_file_that_nobody_holds_names_no_process(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text('{"invocations": [{"state": "running"}]}')
    (tmp_path / "a" / ".lock").write_text(str(os.getpid()))
    found = Runs(tmp_path).get("a")
    assert found is not None
    assert (found.pid, found.state) == (0, "killed")


def test_quantiles_of_what_was_observed_between_two_moments() -> None:
    limits = (0.1, 0.2, 0.4, 0.8, 1.6)
    rng = np.random.default_rng(0)
    before, fresh = rng.uniform(0, 1, 500), rng.uniform(0.2, 1.6, 4000)

    def text(values: np.ndarray) -> str:
        lines = [f'm_bucket{{le="{limit}"}} {(values <= limit).sum()}' for limit in limits]
        return "\n".join([*lines, f'm_bucket{{le="+Inf"}} {len(values)}', "# a comment", f"m_count {len(values)}"])

    now, old = parse_metrics(text(np.r_[before, fresh])), parse_metrics(text(before))
    assert total(now, "m_count") == 4500
    for share in (0.5, 0.95, 0.99):
        assert abs(quantile(now, old, "m", share) - np.quantile(fresh, share)) < 0.05
    assert np.isnan(quantile(now, now, "m", 0.5))


def test_the_shell_of_a_command_survives_the_signal_that_ends_it(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    job = jobs.start(["serve", "nothing-there"], screen="serve", action="serve")
    time.sleep(0.3)
    os.killpg(job.pid, signal.SIGTERM)
    ended = wait_for(lambda: (one := jobs.get(job.id)) and not one.is_alive and one)
    assert ended.code is not None  # it was written by the shell, after the command had ended


def test_intervals_of_tests_have_charts_of_their_own(tmp_path: Path) -> None:
    measure = {"name": "rating: mean", "low": -0.1, "high": 0.3}
    tests = [
        {"name": "t", "status": "running", "measures": [measure]},
        {"name": "u", "status": "ended", "measures": [measure]},
    ]
    values = interval_values({"tests": tests})
    assert values == {f"A/B test t, rating mean: {key}": measure[key] for key in ("low", "high")}
    assert interval_values(None) == interval_values({"tests": ["x", {"measures": 3}]}) == {}
    job = Job("20261128-000000-abcdef", ["serve", "m"], "serve", "serve", "", 0, "", 0.0)
    watch = Watch(Jobs(tmp_path))
    watch._samples[job.id] = deque([(1.0, {**values, "Tokens per second: answers": 3.0}), (2.0, values)])
    (chart,) = watch.charts(job, 0.0, of_tests=True)
    assert (chart["title"], chart["zero"], len(chart["traces"][0]["y"])) == ("A/B test t, rating mean", False, 2)
    assert [chart["title"] for chart in watch.charts(job, 0.0)] == ["Tokens per second"]
    assert watch.charts(job, 2.0, of_tests=True) == []
