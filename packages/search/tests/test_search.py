"""A whole search: what it tries, what it refuses, what it writes, and who else may add a strategy."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.core.records import read_records
from modelwright.recipes.load import load
from modelwright.train.build import train
from modelwright.train.job import TrainJob, TrainResult
from modelwright_search.result import SearchResult, as_text
from modelwright_search.run import search
from modelwright_search.space import Axis
from modelwright_search.strategies import STANDARD, STRATEGIES, known_strategies
from modelwright_search.strategies.optuna_studies import HALVING, RUNGS
from search_runs import copied, search_in, trials_of, wish

pytestmark = pytest.mark.slow

Searched = tuple[Path, SearchResult]


@pytest.fixture(scope="module")
def searched(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """A search by all strategies of shapes."""
    run = copied(packed, tmp_path_factory.mktemp("searched"))
    names = ("halving", "tpe", "random", "scaled", "reinforce")
    return run, search_in(run, wish(packed, strategies=names, num_repetitions=1))


@pytest.mark.slow
def test_every_strategy_spends_its_budget_and_no_more(searched: Searched) -> None:
    _, result = searched
    spent = {one.bench.strategy: one.bench.spent for one in result.contenders}
    assert list(spent) == [STANDARD, "halving", "tpe", "random", "scaled", "reinforce"]
    assert spent[STANDARD] == 1.0
    dearest = max(trial.cost for trial in result.trials)
    assert all(2.0 - dearest < cost <= 2.0 + 1e-6 for name, cost in spent.items() if name in ("tpe", "random"))
    assert all(0.0 < cost <= 2.0 + 1e-6 for cost in spent.values())


def test_a_candidate_is_trained_once_and_gives_each_strategy_the_same_loss(searched: Searched) -> None:
    run, result = searched
    records = read_records(run / "search" / "journal.jsonl")
    trainings = [record["key"] for record in records if record["kind"] == "training"]
    assert len(set(trainings)) == len(trainings)
    losses: dict[str, set[float | None]] = {}
    for trial in result.trials:
        losses.setdefault(json.dumps([dict(trial.choices), trial.share], sort_keys=True), set()).add(trial.loss)
    assert all(len(same) == 1 for same in losses.values())
    assert not (run / "search" / "trainings").exists() or not any((run / "search" / "trainings").iterdir())


def test_a_candidate_is_trained_longer_after_it_was_trained_shorter(searched: Searched) -> None:
    _, result = searched
    trials = [trial for trial in result.trials if trial.strategy == "halving" and trial.cost]
    assert {trial.share for trial in trials} == set(RUNGS)
    for trial in trials:
        shorter = [one.share for one in trials[: trial.number] if one.choices == trial.choices]
        assert trial.share == RUNGS[0] or RUNGS[0] in shorter


def test_what_halving_leaves_over_pays_for_the_next_best(packed: Path, tmp_path: Path) -> None:
    """Whatever is not trained for the full length in the end costs more than what is left."""
    run = copied(packed, tmp_path)
    result = search_in(run, wish(packed, strategies=("halving",), budget=3.5))
    trials = [trial for trial in result.trials if trial.strategy == "halving"]
    full = [trial.choices for trial in trials if trial.share == 1.0]
    left = 3.5 - sum(trial.cost for trial in trials)
    others = [trial for trial in trials if trial.choices not in full]
    assert others
    assert all(trial.cost / trial.share > left for trial in others)


class EqualCosts:
    """A workbench whose candidates are numbers: they cost a training of the run's own model, and lose what they are."""

    def __init__(self, budget: float) -> None:
        self.budget, self.seed, self.spent, self.space = budget, 5, 0.0, self
        self.axes = [Axis("number", tuple(range(10**6)), is_ordered=True)]
        self.trials: list[Any] = []

    def find(self, choices: dict[str, int], share: float) -> Any:
        return next((trial for trial in self.trials if (trial.choices, trial.share) == (choices, share)), None)

    def try_out(self, choices: dict[str, int], share: float = 1.0, *, reserve: float = 0.0) -> Any:
        if self.spent + share + reserve > self.budget:
            return None
        self.spent += share
        trial = SimpleNamespace(number=len(self.trials), choices=choices, share=share, loss=float(choices["number"]))
        self.trials.append(trial)
        return trial


def naive_halving(losses: list[float], budget: float) -> list[tuple[float, float]]:
    """Losses and lengths of asynchronous successive halving of candidates with these losses, in order."""
    trials, rungs, best = list[tuple[float, float]](), dict[float, list[float]](), dict[float, float]()
    for loss in losses:
        if sum(share for _, share in trials) + sum(RUNGS) > budget:
            break
        for share in RUNGS:
            trials.append((loss, share))
            best[loss] = share
            rung = rungs.setdefault(share, [])
            rung.append(loss)
            if loss not in sorted(rung)[: max(1, len(rung) // 2)]:
                break
    for loss in sorted(best, key=lambda loss: (-best[loss], loss)):
        if best[loss] < 1.0 and sum(share for _, share in trials) + 1.0 <= budget:
            trials.append((loss, 1.0))
    return trials


@pytest.mark.parametrize("budget", [1.75, 4.0, 8.0, 20.0])
def test_halving_is_asynchronous_successive_halving(budget: float) -> None:
    bench = EqualCosts(budget)
    HALVING.run(cast(Any, bench))
    tried = [(trial.loss, trial.share) for trial in bench.trials]
    assert tried == naive_halving(list(dict.fromkeys(loss for loss, _ in tried)), budget)
    assert budget - 1.0 < bench.spent <= budget
    if budget >= 8.0:
        shares = [share for _, share in tried]
        assert shares.count(0.25) > shares.count(0.5) > shares.count(1.0) >= 2


def test_the_winner_has_the_lowest_mean_over_seeds_and_its_yaml_is_a_run(searched: Searched) -> None:
    run, result = searched
    assert result.winner.mean_loss == min(one.mean_loss for one in result.contenders)
    assert all(len(one.losses) == 2 and one.losses[0] != one.losses[1] for one in result.contenders)
    assert result.winner.best is not None
    config = load(str(run / "search" / "winner.yaml"), {}).config
    assert config.name == "tiny-searched"
    assert config.model.num_layers == result.winner.best.choices["layers"]
    assert config.model.num_parameters == result.winner.best.num_parameters
    assert config.first_training.learning_rate == load(str(run), {}).config.first_training.learning_rate


def test_the_report_has_what_it_promises(searched: Searched) -> None:
    run, result = searched
    report = json.loads((run / "search" / "report.json").read_text())
    assert {"limits", "strategies", "trials", "frontier", "winner", "latency"} <= set(report)
    promise = report["latency"]["winner"]
    assert promise["promised_ms"] > 0
    assert promise["measured_ms"] > 0
    assert promise["is_kept"] == (abs(promise["measured_ms"] / promise["promised_ms"] - 1.0) <= 0.1)
    text = (run / "search" / "report.txt").read_text()
    assert text == as_text(result, run / "search")
    assert "measured again in a fresh engine" in text
    assert "Controller after" in text
    assert report["findings"]["controller"]["num_rewards"] >= sum(one.strategy == "reinforce" for one in result.trials)


def test_the_frontier_has_what_no_trial_dominates(searched: Searched) -> None:
    _, result = searched
    full = [trial for trial in result.trials if trial.is_full]
    points = {(trial.latency_ms, trial.loss) for trial in full}

    def dominated(point: tuple[float, float | None]) -> bool:
        return any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)  # pyright: ignore

    assert {(trial.latency_ms, trial.loss) for trial in result.frontier} == {p for p in points if not dominated(p)}


def test_what_is_done_is_not_done_again_and_strategies_may_be_added(packed: Path, tmp_path: Path) -> None:
    run = copied(packed, tmp_path)
    search_in(run, wish(packed, budget=1.0))
    before = (run / "search" / "journal.jsonl").read_text()
    search_in(run, wish(packed, budget=1.0))
    assert (run / "search" / "journal.jsonl").read_text() == before
    search_in(run, wish(packed, budget=1.0, strategies=("random", "scaled")))
    assert (run / "search" / "journal.jsonl").read_text().startswith(before)


def test_another_search_in_the_same_folder_is_refused_unless_it_restarts(packed: Path, tmp_path: Path) -> None:
    run = copied(packed, tmp_path)
    search_in(run, wish(packed, budget=1.0))
    with pytest.raises(ConfigError, match=r"another --budget \(1.0, now 2.0\).*--restart"):
        search_in(run, wish(packed))
    search_in(run, wish(packed), restart=True)
    assert sum(trial[-1] for trial in trials_of(run) if trial[0] == "random") > 1.0


def test_other_weights_to_begin_with_are_another_search(packed: Path, tmp_path: Path) -> None:
    """The other model has the same shape, as one that was trained again in the same folder has."""
    run, start = copied(packed, tmp_path), tmp_path / "start"
    shutil.copytree(packed / "pretrain" / "artifact", start)
    space = tmp_path / "rates.yaml"
    space.write_text("space: hyperparameters\nlearning_rate: [1e-3, 2e-3]\nbatch_tokens: [256]\nweight_decay: [0.0]\n")
    wishes = wish(packed, space=str(space), budget=1.0)

    def searched_from_start() -> None:
        config = load(str(run), {"init_from": str(start)}).config
        search(config, RunDir(tmp_path / "search"), wishes, words=[], progress=SilentProgress(), restart=False)

    searched_from_start()
    searched_from_start()
    (start / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="another model in init_from"):
        searched_from_start()


def test_the_report_of_the_controller_is_of_what_it_learned_in_the_search(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a space with fewer candidates than the budget would pay for, the search ends by repetition."""
    monkeypatch.setattr("modelwright_search.workbench.MAX_REFUSALS", 8)
    space = tmp_path / "rates.yaml"
    space.write_text("space: hyperparameters\nlearning_rate: [1e-3, 2e-3]\nbatch_tokens: [256]\nweight_decay: [0.0]\n")
    run = copied(packed, tmp_path)
    result = search_in(run, wish(packed, space=str(space), budget=8.0, strategies=("reinforce",)))
    (finding,) = result.findings
    assert finding.figures["num_rewards"] == 2 + 8  # two trainings, and as many repetitions as are allowed


def test_candidates_beyond_a_limit_are_measured_but_not_trained(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelwright_search.workbench.MAX_REFUSALS", 8)
    run = copied(packed, tmp_path)
    with pytest.raises(ModelwrightError, match=r"no candidate within .* was trained; raise --max-latency-ms"):
        search_in(run, wish(packed, max_latency_ms=1e-6))
    reasons = {record["reason"] for record in read_records(run / "search" / "journal.jsonl")
               if record["kind"] == "trial" and record["strategy"] == "random"}  # fmt: skip
    assert reasons == {"latency"}


def test_parameters_are_counted_before_anything_is_measured(packed: Path, tmp_path: Path) -> None:
    run = copied(packed, tmp_path)
    result = search_in(run, wish(packed, max_parameters=30_000))
    refused = [trial for trial in result.trials if trial.strategy == "random" and trial.num_parameters > 30_000]
    assert refused
    assert all(trial.reason == "parameters" and not trial.latency_ms for trial in refused)
    assert all(trial.num_parameters <= 30_000 for trial in result.trials if trial.cost and trial.strategy == "random")


PACKAGE = """
from modelwright_search.workbench import SearchStrategy


def first_and_last(bench):
    for place in (0, -1):
        bench.try_out({axis.name: axis.values[place] for axis in bench.space.axes})


CORNERS = SearchStrategy(name="corners", run=first_and_last)
"""


def test_a_package_adds_a_strategy(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    (package / "corners-1.0.dist-info").mkdir(parents=True)
    (package / "corners.py").write_text(PACKAGE)
    (package / "corners-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: corners\nVersion: 1.0\n")
    entry = "[modelwright.search_strategies]\ncorners = corners:CORNERS\n"
    (package / "corners-1.0.dist-info" / "entry_points.txt").write_text(entry)
    assert len(known_strategies()) == len(STRATEGIES)
    monkeypatch.syspath_prepend(package)
    run = copied(packed, tmp_path)
    result = search_in(run, wish(packed, strategies=("corners",)))
    monkeypatch.delitem(sys.modules, "corners")
    assert [(one[0], one[2]["layers"]) for one in trials_of(run)] == [(STANDARD, 2), ("corners", 1), ("corners", 2)]
    assert {one.bench.strategy for one in result.contenders} == {STANDARD, "corners"}


def test_hyperparameters_by_the_same_command(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equally many tokens whatever the batch; a training that fails, or ends without a number, is a trial without a
    loss.
    """

    def failing(job: TrainJob, *more: Any) -> TrainResult:
        if job.config.learning_rate == 2e-3:
            raise ModelwrightError("training has diverged; lower learning_rate")
        result = train(job, *more)
        return replace(result, heldout_loss=math.nan) if job.config.learning_rate == 3e-3 else result

    monkeypatch.setattr("modelwright_search.candidates.train", failing)
    run = copied(packed, tmp_path)
    space = tmp_path / "rates.yaml"
    space.write_text("space: hyperparameters\nlearning_rate: [1e-3, 2e-3, 3e-3]\nbatch_tokens: [128, 512]\n")
    result = search_in(run, wish(packed, space=str(space), budget=8.0))
    trials = [trial for trial in result.trials if trial.strategy == "random"]
    assert {trial.choices["batch_tokens"] for trial in trials} == {128, 512}
    assert {trial.cost for trial in trials} == {1.0}
    failed = {trial.choices["learning_rate"] for trial in trials if trial.loss is None and trial.reason == "diverged"}
    assert failed == {2e-3, 3e-3}
    assert all(trial.loss is not None for trial in trials if trial.choices["learning_rate"] == 1e-3)
    assert result.winner.best is not None
    config = yaml.safe_load((run / "search" / "winner.yaml").read_text())
    assert config["pretrain"]["learning_rate"] == result.winner.best.choices["learning_rate"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"strategies": ("tpee",)}, "--strategies: 'tpee' is not one of halving, tpe.*did you mean 'tpe'"),
        ({"strategies": ("tpe", "tpe")}, "--strategies: tpe is named twice"),
        ({"strategies": ()}, "--strategies: names none of halving"),
        ({"strategies": ("halving",), "budget": 1.5}, "--budget: halving needs at least 1.75, got 1.5"),
        ({"space": "architectures"}, "--space: 'architectures' is not one of"),
        ({"space": "hyperparameters", "strategies": ("scaled",)}, "scaled works on shapes"),
    ],
)
def test_what_makes_no_search_is_named(packed: Path, tmp_path: Path, changes: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        search_in(copied(packed, tmp_path), wish(packed, **changes))


@pytest.mark.parametrize(
    ("changes", "option"),
    [({"budget": 0.5}, "--budget"), ({"num_steps": 1}, "--steps"), ({"num_streams": 0}, "--streams")],
)
def test_wishes_out_of_range_name_their_option(packed: Path, changes: dict, option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: "):
        wish(packed, **changes)
