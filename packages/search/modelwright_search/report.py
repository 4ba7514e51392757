"""The report of a search, as text and as JSON, and the winner's settings as YAML."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import save_yaml
from modelwright_search.result import Contender, Promise, SearchResult
from modelwright_search.space import Choices
from modelwright_search.workbench import Trial

WINNER = "winner.yaml"


def write_report(result: SearchResult, folder: Path) -> None:
    """`report.json`, `report.txt` and `winner.yaml`."""
    save_yaml(folder / WINNER, result.config)
    write_atomic(folder / "report.json", json.dumps(as_json(result), indent=1))
    write_atomic(folder / "report.txt", as_text(result, folder))


def as_json(result: SearchResult) -> dict[str, Any]:
    """The whole result; a number that is not finite is null."""
    return {
        "limits": vars(result.limits),
        "budget": result.budget,
        "strategies": [_contender_json(one) for one in result.contenders],
        "trials": [vars(trial) for trial in result.trials],
        "frontier": [vars(trial) for trial in result.frontier],
        "winner": _contender_json(result.winner),
        "findings": {finding.name: dict(finding.figures) for finding in result.findings},
        "latency": {
            "winner": _promise_json(result.promise),
            "standard": _promise_json(result.standard_promise),
        },
    }


def _promise_json(promise: Promise) -> dict[str, Any]:
    return {**vars(promise), "ratio": promise.ratio, "is_kept": promise.is_kept}


def _contender_json(one: Contender) -> dict[str, Any]:
    bench = one.bench
    return {
        "strategy": bench.strategy,
        "num_trained": bench.num_trained,
        "num_refused": len(bench.trials) - bench.num_trained,
        "spent": bench.spent,
        "best": vars(one.best) if one.best else None,
        "losses": list(one.losses),
        "mean_loss": one.mean_loss if math.isfinite(one.mean_loss) else None,
    }


def as_text(result: SearchResult, folder: Path) -> str:
    """For a terminal."""
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
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
