"""Precision and recall of each step of cleaning on a spoiled corpus, and the usable share before and after.

    python benchmarks/spoil_corpus.py corpus/*.jsonl --out spoiled
    python benchmarks/judge_cleaning.py spoiled
    python benchmarks/judge_cleaning.py spoiled --clean.noise.trusted stdlib --clean.quality.thresholds auto

Options are those of `modelwright clean`. `modelwright_claims.cleaning_scores` says what counts.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelwright.core.config import parse, read_overrides, split_settings
from modelwright.recipes.cleaning import CleanCommandConfig
from modelwright_claims.cleaning_scores import Result, judge_cleaning, read_spoiled


def lines(result: Result) -> Iterator[str]:
    """The result as tables in Markdown."""
    yield "| step | precision | recall |"
    yield "| --- | --- | --- |"
    for step, score in result.scores.items():
        yield f"| {step} | {_percent(score.precision)} | {_percent(score.recall)} |"
    yield ""
    yield "| step | form | number | found |"
    yield "| --- | --- | --- | --- |"
    for (step, form), score in sorted(result.forms.items()):
        yield f"| {step} | {form} | {score.found + score.missed} | {_percent(score.recall)} |"
    yield ""
    before, after = result.before / result.documents, result.after / max(1, result.kept)
    yield f"usable: {before:.1%} of {result.documents:,} documents before, {after:.1%} of the {result.kept:,} kept"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def main() -> None:
    leading, own, settings = split_settings(sys.argv[1:], ("help",))
    if own or len(leading) != 1:
        sys.exit(__doc__)
    config: Any = parse(CleanCommandConfig, read_overrides(CleanCommandConfig, settings, ("help",)))
    entries = read_spoiled(Path(leading[0]))
    print(f"{len(entries):,} documents: {dict(Counter(label.form or 'not spoiled' for _, label in entries))}\n")
    print("\n".join(lines(judge_cleaning(entries, config.clean))))


if __name__ == "__main__":
    main()
