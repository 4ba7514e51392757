"""The claims about updates: their rules, and what they measure with."""

import pytest

from claim_verdicts import verdict
from modelwright_continual.claims import forgetting, update_time


def forgetting_samples(**changes: list[float]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    bits = {arm.name: 2.5 for arm in forgetting.ARMS} | {"replay 25%": 2.005}
    for name, old in (bits | {forgetting.FIRST: 1.9, forgetting.SCRATCH: 2.0}).items():
        for kind in ("old", "new", "old, validation"):
            samples[f"{kind}: {name}"] = [old, old + 0.001]
        samples[f"FLOPs: {name}"] = [10.0 if name == forgetting.FIRST else 15.0] * 2
        for number in (1, 2, 3):
            samples[f"old after update {number}: {name}"] = [old] * 2
    return samples | changes


def test_the_share_of_replay_is_chosen_on_other_documents_than_it_is_judged_on() -> None:
    conditions = {"seeds": 2}
    met = verdict(forgetting.CLAIM, forgetting_samples(), conditions)
    assert met.kind == "met", met.reason
    assert "replay 25% (chosen on the validation half)" in met.reason
    other = forgetting_samples(**{"old, validation: replay 0%": [1.0, 1.0]})
    assert verdict(forgetting.CLAIM, other, conditions).kind == "short"
    dear = forgetting_samples(**{"FLOPs: replay 25%": [18.0, 18.0]})
    assert "compute of the updates" in verdict(forgetting.CLAIM, dear, conditions).reason


def test_pieces_of_code_are_whole_lines_and_lose_nothing() -> None:
    code = "".join(f"line {number} = {'x' * (number % 90)}\n" for number in range(400))
    pieces = list(forgetting._pieces(code))
    assert "".join(pieces) == code
    assert all(forgetting.FEWEST_CHARS <= len(piece) <= forgetting.PIECE_CHARS for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces)


def test_an_update_that_is_not_promoted_is_short() -> None:
    conditions = {"ended": "refused"}
    samples = {update_time.FAILED: [0.0], update_time.ENDED: [1.0], update_time.HANDSOFF: [600.0, 610.0]}
    samples |= {f"change of {update_time.OLD}": [0.1, -0.4, 0.6], f"change of {update_time.NEW}": [-20.0, -22.0, -18.0]}
    samples |= {f"bits per byte, {name}": [2.0, 2.0, 2.0] for name in update_time.CHANGES}
    met = verdict(update_time.CLAIM, samples, conditions)
    assert met.kind == "met", met.reason
    assert met.figures["shorter than a week"].value == pytest.approx(7 * 24 * 6, rel=0.01)
    assert "whole demonstration" not in met.figures
    timed = verdict(update_time.CLAIM, {**samples, update_time.WHOLE: [780.0]}, conditions)
    assert timed.figures["whole demonstration"].value == pytest.approx(13.0)
    assert verdict(update_time.CLAIM, {**samples, update_time.ENDED: [0.0]}, conditions).kind == "short"
    worse = {**samples, f"change of {update_time.OLD}": [1.5, 1.0, 2.5]}
    assert "change of old texts" in verdict(update_time.CLAIM, worse, conditions).reason
