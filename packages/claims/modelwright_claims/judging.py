"""Judge a record: check each part of a target against its bound, and note missing parts of the record.

The rule for all claims: a part of the target that the samples miss makes the verdict "short", whatever else is
missing; otherwise a part that the samples cannot answer makes it "not judged"; only when all parts hold is it "met".
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from modelwright_claims.claim import UNTESTABLE, Claim, Figure, Measurement, Samples, Verdict
from modelwright_claims.statistics import Estimate, estimate, paired_t_test

Relation = Literal["<", "<=", ">", ">="]
RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
WORDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
Source = float | Estimate | Callable[[], Estimate | float]


class Lacks(KeyError):
    """The record lacks something that the rule asks for, which the text names."""

    def __str__(self) -> str:
        return str(self.args[0])


class Stored(Mapping[str, Any]):
    """Samples or conditions of a record. A name that is not there raises `Lacks`."""

    def __init__(self, values: Mapping[str, Any], noun: str) -> None:
        self.values_by_name = values
        self.noun = noun

    def __getitem__(self, name: str) -> Any:
        if name not in self.values_by_name:
            raise Lacks(f"{self.noun} {name!r}")
        return self.values_by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


@dataclass
class Judgment:
    """Collects the parts of a verdict."""

    figures: dict[str, Figure] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    """Clauses of the reason, whatever the verdict is."""
    missed: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of the target: it ends where the record lacks something, and the verdict says what that is."""
        try:
            yield
        except Lacks as lacks:
            if str(lacks) not in self.lacking:
                self.lacking.append(str(lacks))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Figures that no target speaks of: they are left out where the record lacks their samples."""
        with suppress(Lacks):
            yield

    def ask(
        self,
        name: str,
        found: Source,
        unit: str = "",
        relation: Relation | Literal[""] = "",
        limit: float = 0.0,
        *,
        what: str = "",
        say: str = "",
    ) -> None:
        """Add a figure, and ask for a bound of it where there is a relation: a part of the target.

        found: a number is a single sample, without a bound (`exact` marks counts); a function is a part of its target,
        which ends where the record lacks something.
        what: the words for a bound that is missed, the figure's name by default; say: a clause of the reason, in which
        `{0}` is the estimate. No name adds no figure.
        """
        with self.part():
            result = found() if callable(found) else found
            result = estimate([result]) if isinstance(result, int | float) else result
            if name:
                self.figures[name] = result.figure(unit)
            if say:
                self.said.append(say.format(result))
            if relation:
                self.check(what or name, result, limit, unit if unit in ("", "x", "%") else f" {unit}", relation)

    def note(self, name: str, found: Source, unit: str = "", *, say: str = "") -> None:
        """Add a figure that no target speaks of; it is left out where the record lacks its samples."""
        lacking = len(self.lacking)
        self.ask(name, found, unit, say=say)
        del self.lacking[lacking:]

    def show(
        self, samples: Samples, names: Iterable[str] | Mapping[str, str], unit: str = "", factor: float = 1.0
    ) -> None:
        """Add the means of samples as figures by their own names, or by those that `names` maps to the samples'."""
        for name, sample in (names if isinstance(names, Mapping) else {one: one for one in names}).items():
            self.note(name, lambda sample=sample: estimate([factor * value for value in samples[sample]]), unit)

    def check(self, what: str, found: Estimate, limit: float, unit: str, relation: Relation) -> bool:
        """Return whether the bound has the relation to the limit; a miss, or a lack of repeats, is noted."""
        is_floor = relation.startswith(">")
        side, bound = ("lower", found.lower) if is_floor else ("upper", found.upper)
        if RELATIONS[relation](bound, limit):
            return True
        has_bound = found.exact or found.count > 1
        if not has_bound and (found.mean > limit if is_floor else found.mean < limit):
            self.lacking.append(f"repeats of {what}: one gives no bound")
            return False
        basis = f"{side} bound {_number(bound)}{unit}" if has_bound else "one repeat, no bound"
        basis = "exact" if found.exact else basis
        self.missed.append(f"{what} {_number(found.mean)}{unit} ({basis}), not {WORDS[relation]} {limit:g}{unit}")
        return False

    def differs(self, method: Sequence[float], rival: Sequence[float], figure: str, otherwise: str) -> None:
        """Ask for p < 0.05 in a paired test, with two pairs or more; `otherwise` names the miss, with the p-value for
        `{p}`.
        """
        if len(method) > 1:
            p_value = paired_t_test(method, rival).p_value
            self.figures[figure] = Figure(value=p_value, unit="")
            self.require(p_value < 0.05, otherwise.format(p=f"{p_value:.2g}"))

    def require(self, holds: bool, otherwise: str) -> None:
        """Ask for anything else; `otherwise` names the miss."""
        if not holds:
            self.missed.append(otherwise)

    def verdict(self) -> Verdict:
        """Return the verdict; missed parts are named first."""
        said = "; ".join(self.said)
        if self.missed:
            return self._verdict("short", "; ".join(self.missed), said)
        if self.lacking:
            return self._verdict("not judged", f"the record lacks {', '.join(self.lacking)}", said)
        return Verdict(kind="met", reason=said, figures=self.figures)

    def _verdict(self, kind: Literal["short", "not judged"], first: str, said: str) -> Verdict:
        return Verdict(kind=kind, reason=f"{first}. {said}" if said else first, figures=self.figures)


def judge(claim: Claim, measurement: Measurement) -> Verdict:
    """Judge a measurement, new or stored, by the claim's rule."""
    if UNTESTABLE in measurement.conditions:
        return Verdict(kind="cannot be tested here", reason=str(measurement.conditions[UNTESTABLE]))
    try:
        return claim.judge(Stored(measurement.samples, "samples"), Stored(measurement.conditions, "condition"))
    except Lacks as lacks:
        return Verdict(kind="not judged", reason=f"the record lacks {lacks}")
    except ValueError:  # the least or the largest of none
        if measurement.samples:
            raise
        return Verdict(kind="not judged", reason="the record lacks samples")


def names_between(samples: Mapping[str, Sequence[float]], prefix: str, suffix: str = "") -> list[str]:
    """Return what stands between `prefix` and `suffix` in the names of samples, in their order."""
    return [
        name[len(prefix) : len(name) - len(suffix)]
        for name in samples
        if name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix)
    ]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
