"""The result of a search: the best candidate of each strategy, trained again with other seeds, the winner among them,
its latency measured again, and the report as text and as JSON.

The best of many trials is partly the luckiest. So each strategy's best candidate is trained again with other seeds, and
the winner is chosen by the mean over all of them.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import save_yaml, write_atomic
from modelwright.core.config import ModelwrightError, merge
from modelwright.model.decoder import ModelConfig
from modelwright_search.candidates import NUM_APPEALS, Candidates
from modelwright_search.config import SearchConfig
from modelwright_search.space import Choices
from modelwright_search.workbench import SearchFinding, ServingLimits, Trial, Workbench

PROMISE_MARGIN = 0.1
"""Largest relative difference between the winner's latency at the end and in its trial."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A strategy with its best candidate. losses: held-out losses of the best trial and of its repetitions with other
    seeds, None for a failed one; empty without a best trial. finding: the strategy's addition to the report.
    """

    bench: Workbench
    losses: Sequence[float | None]
    finding: SearchFinding | None

    @property
    def best(self) -> Trial | None:
        """Trial of full length with the lowest loss; None without one."""
        return best_of(self.bench)

    @property
    def mean_loss(self) -> float:
        """Mean of the losses; infinite if a training failed."""
        losses = [loss for loss in self.losses if loss is not None]
        return statistics.mean(losses) if losses and len(losses) == len(self.losses) else math.inf


def best_of(bench: Workbench) -> Trial | None:
    """Returns the trial of full length with the lowest loss; None without one."""
    full = [trial for trial in bench.trials if trial.is_full]
    return min(full, key=lambda trial: (trial.loss, trial.latency_ms), default=None)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A candidate's latency in milliseconds a token: in its trial, and at the end in a fresh engine."""

    promised_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.promised_ms

    @property
    def is_kept(self) -> bool:
        """True if the two differ by at most `PROMISE_MARGIN`."""
        return abs(self.ratio - 1.0) <= PROMISE_MARGIN


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Outcome of a search. contenders: strategies, the run's own model first; promise: latency of the winner;
    standard_promise: latency of the run's own model, which shows how much the machine itself has changed; config:
    settings of a run with the winner, in plain form.
    """

    limits: ServingLimits
    budget: float
    contenders: Sequence[Contender]
    winner: Contender
    promise: Promise
    standard_promise: Promise
    config: dict[str, Any]

    @property
    def trials(self) -> list[Trial]:
        return [trial for one in self.contenders for trial in one.bench.trials]

    @property
    def findings(self) -> list[SearchFinding]:
        return [one.finding for one in self.contenders if one.finding]

    @property
    def frontier(self) -> list[Trial]:
        """Pareto frontier of the trials of full length, the fastest first: no other trial is better in loss or latency
        and at least as good in the other.
        """
        best: list[Trial] = []
        full = (trial for trial in self.trials if trial.is_full)
        for trial in sorted(full, key=lambda trial: (trial.latency_ms, trial.loss)):
            if not best or (trial.loss or 0.0) < (best[-1].loss or 0.0):
                best.append(trial)
        return best


def judge(
    searched: Mapping[str, tuple[Workbench, SearchFinding | None]], wish: SearchConfig, limits: ServingLimits
) -> SearchResult:
    """Repeats the best candidate of each strategy, chooses the winner and measures its latency in a fresh engine.
    searched: workbench and finding by strategy, the run's own model first. Raises `ModelwrightError` if no candidate
    within the limits was trained.
    """
    contenders: list[Contender] = []
    for bench, finding in searched.values():
        losses, best = list[float | None](), best_of(bench)
        if best is not None:  # nothing is charged for repetitions
            seeds = range(1, wish.num_repetitions + 1)
            losses = [best.loss, *(bench.train(best.choices, 1.0, seed) for seed in seeds)]
        contenders.append(Contender(bench=bench, losses=losses, finding=finding))
    eligible = [one for one in contenders if one.best is not None and limits.allow(one.best)]
    if not eligible:
        raise ModelwrightError(
            f"no candidate within {limits.latency_ms:.3g} ms a token and {limits.num_parameters:,} parameters was "
            "trained; raise --max-latency-ms, --max-parameters or --budget, or name smaller values with --space"
        )
    winner = min(eligible, key=lambda one: one.mean_loss)
    assert winner.best is not None
    candidates, space = winner.bench.candidates, winner.bench.space
    chosen = space.candidate(winner.best.choices)
    run, stage = candidates.config, candidates.config.trainings[0].name
    return SearchResult(
        limits=limits,
        budget=wish.budget,
        contenders=contenders,
        winner=winner,
        promise=promise_of(candidates, chosen.model),
        standard_promise=promise_of(candidates, space.standard.model),
        config=merge(run.plain(), {"name": f"{run.name}-searched", **space.settings(chosen, stage)}),
    )


def promise_of(candidates: Candidates, shape: ModelConfig) -> Promise:
    """Returns a shape's latency and a new measurement of it in a fresh engine. A shape that is slower than the margin
    allows is measured again, because other load only ever adds time.
    """
    promise = Promise(promised_ms=candidates.latency_ms(shape), measured_ms=candidates.measure(shape))
    for _ in range(NUM_APPEALS):
        if promise.is_kept or promise.ratio < 1.0:
            break
        promise = replace(promise, measured_ms=min(promise.measured_ms, candidates.measure(shape)))
    return promise


WINNER = "winner.yaml"


def write_report(result: SearchResult, folder: Path) -> None:
    """Writes `report.json`, `report.txt` and `winner.yaml`."""
    save_yaml(folder / WINNER, result.config)
    write_atomic(folder / "report.json", json.dumps(as_json(result), indent=1))
    write_atomic(folder / "report.txt", as_text(result, folder))


def as_json(result: SearchResult) -> dict[str, Any]:
    """Returns the whole result as plain data; a number that is not finite is null."""

    def strategy(one: Contender) -> dict[str, Any]:
        return {
            "strategy": one.bench.strategy,
            "num_trained": one.bench.num_trained,
            "num_refused": len(one.bench.trials) - one.bench.num_trained,
            "spent": one.bench.spent,
            "best": vars(one.best) if one.best else None,
            "losses": list(one.losses),
            "mean_loss": one.mean_loss if math.isfinite(one.mean_loss) else None,
        }

    return {
        "limits": vars(result.limits),
        "budget": result.budget,
        "strategies": [strategy(one) for one in result.contenders],
        "trials": [vars(trial) for trial in result.trials],
        "frontier": [vars(trial) for trial in result.frontier],
        "winner": strategy(result.winner),
        "findings": {finding.name: dict(finding.figures) for finding in result.findings},
        "latency": {
            name: {**vars(promise), "ratio": promise.ratio, "is_kept": promise.is_kept}
            for name, promise in (("winner", result.promise), ("standard", result.standard_promise))
        },
    }


def as_text(result: SearchResult, folder: Path) -> str:
    """Formats the result for a terminal."""
    blocks = [
        _winner_lines(result, folder),
        ["Strategies, each with its best candidate and its losses over seeds:", *_strategy_table(result)],
        *([[finding.text for finding in result.findings]] if result.findings else []),
        ["Loss against latency: no trial has both a lower loss and a lower latency than one of these.",
         *_trial_table(result.frontier)],
        ["Trained trials:", *_trial_table([trial for trial in result.trials if trial.cost])],
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _winner_lines(result: SearchResult, folder: Path) -> list[str]:
    winner, promise, standard = result.winner, result.promise, result.standard_promise
    assert winner.best is not None
    is_standard = winner is result.contenders[0]
    lines = [
        f"winner      {_words(winner.best.choices)}",
        f"from        {winner.bench.strategy}" + (" (nothing has beaten the run's own model)" if is_standard else ""),
        f"loss        {winner.mean_loss:.4f} nats a token, held out, mean of {len(winner.losses)} seeds",
        f"parameters  {winner.best.num_parameters:,}, where {result.limits.num_parameters:,} are allowed",
        f"latency     promised {promise.promised_ms:.3f} ms a token, where {result.limits.latency_ms:.3f} are allowed; "
        f"measured again in a fresh engine {promise.measured_ms:.3f}",
        f"            that is {promise.ratio - 1.0:+.1%}; the run's own model {standard.promised_ms:.3f}, and "
        f"{standard.measured_ms:.3f} ({standard.ratio - 1.0:+.1%})",
    ]
    if not promise.is_kept:
        lines.append(
            "            the promise is not kept: the two differ by more than 10%; run the same command again when the "
            "machine is quiet, which measures once more"
        )
    return [*lines, f"settings    {folder / WINNER}: modelwright run {folder / WINNER}"]


def _strategy_table(result: SearchResult) -> list[str]:
    rows = [["strategy", "trained", "refused", "spent", "mean loss", "losses", "ms a token", "parameters", "candidate"]]
    for one in result.contenders:
        best = one.best
        rows.append(
            [
                one.bench.strategy,
                str(one.bench.num_trained),
                str(len(one.bench.trials) - one.bench.num_trained),
                f"{one.bench.spent:.2f}",
                f"{one.mean_loss:.4f}" if math.isfinite(one.mean_loss) else "-",
                " ".join("failed" if loss is None else f"{loss:.4f}" for loss in one.losses) or "-",
                f"{best.latency_ms:.3f}" if best else "-",
                f"{best.num_parameters:,}" if best else "-",
                _words(best.choices) if best else "-",
            ]
        )
    return aligned(rows)


def _trial_table(trials: Sequence[Trial]) -> list[str]:
    rows = [["strategy", "no.", "length", "loss", "ms a token", "parameters", "cost", "candidate"]]
    for trial in trials:
        rows.append(
            [
                trial.strategy,
                str(trial.number + 1),
                f"{trial.share:.0%}",
                f"{trial.loss:.4f}" if trial.loss is not None else trial.reason,
                f"{trial.latency_ms:.3f}" if trial.latency_ms else "-",
                f"{trial.num_parameters:,}",
                f"{trial.cost:.2f}",
                _words(trial.choices),
            ]
        )
    return aligned(rows)


def _words(choices: Choices) -> str:
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
