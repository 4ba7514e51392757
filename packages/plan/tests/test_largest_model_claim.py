"""The claim on the largest model in a limit of memory: its rule, its search, and one quick measurement."""

import math
import sys

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.objectives.next_token import NextToken
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.command import prove
from modelwright_claims.judging import judge
from modelwright_plan.claims import largest_model
from modelwright_plan.claims.largest_model import CHECKPOINTED, CONFIGURED, FITS, FLOPS, PARAMETERS, PLANNED, Sizes
from modelwright_plan.memory_plan import leanest_step, plan_step

LARGE, SMALL = "2048 tokens", "256 tokens"


def judged(planned: list[float], *, checkpointed: float = 300.0, dropped: str = "") -> Verdict:
    samples = {f"{FLOPS}{way}, {LARGE}": [flops] for way, flops in zip(largest_model.WAYS, (6, 8, 8), strict=True)}
    for way, values in ((CONFIGURED, [100.0] * 3), (CHECKPOINTED, [checkpointed] * 3), (PLANNED, planned)):
        samples |= {f"{what}{way}, {LARGE}": values for what in (FITS, PARAMETERS)}
    others = {name.replace(LARGE, SMALL): [100.0] * len(of) for name, of in samples.items()}
    samples = {name: of for name, of in (samples | others).items() if name != dropped}
    return judge(largest_model.CLAIM, Measurement(samples=samples))


def test_met_only_by_three_times_the_parameters_and_no_fewer_than_by_checkpointing():
    met = judged([330.0, 331.0, 332.0])
    assert met.kind == "met"
    assert met.figures["parameters to as configured, planned, 2048 tokens"].value == pytest.approx(3.31)
    assert met.figures["parameters to as configured, checkpointing alone, 2048 tokens"].value == 3.0
    assert met.figures["more FLOPs, planned, 2048 tokens"].value == pytest.approx(33.3, abs=0.1)
    assert met.figures["parameters, planned, 256 tokens"].value == 100.0
    assert set(largest_model.CLAIM.headline) <= set(met.figures)
    assert judged([330.0, 331.0, 332.0], checkpointed=331.0).kind == "short"
    assert judged([290.0, 300.0, 320.0], checkpointed=100.0).kind == "short", "the mean is above, the bound is not"
    assert judged([250.0] * 3, checkpointed=200.0).kind == "short"


def test_counted_flops_have_to_be_in_the_record():
    assert judged([330.0] * 3, dropped=f"{FLOPS}{PLANNED}, {LARGE}").kind == "not judged"


@pytest.mark.parametrize("start", [1, 40, 97, 100, 101, 400])
def test_the_search_brackets_the_limit_whatever_it_begins_with(start):
    tried = list[int]()

    def peak_of(depth: int) -> float:
        tried.append(depth)
        return 50.0 + 3.0 * depth  # 350 at a depth of 100

    fits, deeper = largest_model.bracket(peak_of, 350.0, start, fineness=40)
    assert fits <= 100 < deeper
    assert deeper - fits <= max(1, fits // 40)
    assert {fits, deeper} <= set(tried)
    assert len(tried) <= 8
    assert len(tried) == len(set(tried))


def test_a_repeat_measures_two_depths():
    tried = list[int]()
    largest_model.bracket(lambda depth: tried.append(depth) or 3.0 * depth, 300.0, 99, fineness=40)
    assert len(tried) == 2


def test_the_search_ends_among_noise():
    noisy = iter(math.sin(number) for number in range(100))
    fits, deeper = largest_model.bracket(lambda depth: 3.0 * depth + 6 * next(noisy), 300.0, 90, fineness=40)
    assert 95 <= fits < deeper <= 105


def test_the_claim_is_listed(capsys):
    assert prove(["--list"]) == 0
    assert "largest_model" in capsys.readouterr().out


@pytest.mark.slow
def test_the_leanest_step_is_what_a_plan_chooses_that_may_compute_everything_again():
    sizes = Sizes(width=64, seq_len=128, rows=(4,), limit_bytes=0, repeats=1, fineness=1)
    model, train = sizes.model(3), sizes.train(CONFIGURED, 4, 3)
    plan = plan_step(model, train, NextToken, seq_len=128, more_compute=0.4)
    assert leanest_step(model, train, seq_len=128) == plan.train == sizes.train(PLANNED, 4, 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to reset the peak of a process")
def test_a_quick_measurement(tmp_path):
    found = largest_model.CLAIM.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    figures = judge(largest_model.CLAIM, found).figures
    assert figures["parameters to as configured, planned, 512 tokens"].value > 2
    assert figures["more FLOPs, planned, 512 tokens"].value == pytest.approx(25, abs=12)
