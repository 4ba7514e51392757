"""The verdict of a claim on made-up samples."""

from modelwright_claims.claim import Claim, Measurement, Verdict
from modelwright_claims.judging import judge


def verdict(claim: Claim, samples: dict, conditions: dict | None = None) -> Verdict:
    """The verdict; one that is met has all figures that the overview shows."""
    found = judge(claim, Measurement(samples=samples, conditions=conditions or {}))
    if found.kind == "met":
        assert set(claim.headline) <= set(found.figures)
    return found
