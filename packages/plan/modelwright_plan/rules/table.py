"""The table of rules: rows that ship with the package, and rules of other packages."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ConfigError
from modelwright_plan.rules.batch_and_rate import (
    logarithmic_rate,
    power_law_batch,
    power_law_rate,
    scaled_rate,
    table_batch,
    table_rate,
)
from modelwright_plan.rules.hardware import daly_interval, model_parallel, narrow_format, young_interval, zero_stage
from modelwright_plan.rules.rule import Evaluator, PublishedRule, RuleOutcome, RuleRow, RuleTarget

GROUP = "modelwright.rules_of_thumb"
"""Entry points of other packages, each a `PublishedRule`."""

EVALUATORS: Mapping[str, Evaluator] = {
    "gpt3_batch": table_batch,
    "deepseek_batch": power_law_batch,
    "gpt3_rate": table_rate,
    "kaplan_rate": logarithmic_rate,
    "deepseek_rate": power_law_rate,
    "square_root_rate": scaled_rate,
    "linear_rate": scaled_rate,
    "bf16": narrow_format,
    "fp16": narrow_format,
    "fp8": narrow_format,
    "zero": zero_stage,
    "tensor_parallel": model_parallel,
    "young": young_interval,
    "daly": daly_interval,
}
"""By the name of a row: each has one."""


@dataclass(frozen=True, kw_only=True)
class _RuleFile:
    rules: tuple[RuleRow, ...]


def shipped_rules(path: Path | None = None) -> tuple[PublishedRule, ...]:
    """The package's own. path: another table, in tests. Raises `ConfigError` for a row without an evaluator or date."""
    path = path or Path(str(files("modelwright_plan.rules") / "rules.yaml"))
    rules = []
    for row in parse(_RuleFile, load_yaml(path)).rules:
        if row.name not in EVALUATORS:
            raise ConfigError(f"{path}: {row.name} has no evaluator; those with one are {', '.join(EVALUATORS)}")
        try:
            datetime.date.fromisoformat(row.date)
        except ValueError:
            raise ConfigError(f"{path}: {row.name}: date: {row.date!r} is not a date; write YYYY-MM-DD") from None
        rules.append(PublishedRule(row=row, evaluate=EVALUATORS[row.name]))
    return tuple(rules)


def known_rules() -> tuple[PublishedRule, ...]:
    """The package's own and those of installed packages. Raises `ConfigError` for an entry point that is none."""
    added: list[PublishedRule] = []
    for entry_point in entry_points(group=GROUP):
        rule = entry_point.load()
        if not isinstance(rule, PublishedRule):
            raise ConfigError(f"{entry_point.value}: the entry point of {GROUP} must be a PublishedRule, got {rule!r}")
        added.append(rule)
    return (*shipped_rules(), *added)


def evaluated(target: RuleTarget, rules: Sequence[PublishedRule]) -> list[tuple[RuleRow, RuleOutcome]]:
    """Each rule with what it says about the training."""
    return [(rule.row, rule.evaluate(rule.row, target)) for rule in rules]


def rule_lines(outcomes: Sequence[tuple[RuleRow, RuleOutcome]]) -> list[str]:
    """Two lines for each rule: what it says, and who says so."""
    lines = []
    for row, outcome in outcomes:
        checked = "" if row.checked else ", not compared with the source since"
        lines.append(f"{row.subject}: {row.statement}: {outcome}")
        lines.append(f"  {row.source}, {row.section} (row of {row.date}{checked})")
    return lines
