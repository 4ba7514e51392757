"""Predictions beside published runs, and interruptions at a published rate beside their simulation."""

import json
import random
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright_plan.claims.interrupted_run import Presence, simulate
from modelwright_plan.published import (
    ASSUMED_COSTS,
    CLOSE_PERCENT,
    LLAMA_3_DEVICES,
    comparisons,
    published_table,
    work_share,
)


def the_row(source: str, model: str, devices: int, **others):
    for one in comparisons():
        row = one.row
        if (row["source"], row["model"], row["devices"]) == (source, model, devices) and others.items() <= row.items():
            return one
    raise AssertionError(f"no row {source} {model} {devices}")


def test_most_held_out_runs_are_predicted_within_the_margin():
    tested = [one for one in comparisons() if one.row["use"] == "test"]
    close = [one for one in tested if abs(one.error_percent) <= CLOSE_PERCENT]
    assert len(tested) >= 12
    assert len(close) >= 0.8 * len(tested)
    assert {one.row["source"] for one in close} >= {"llm-foundry", "torchtitan", "Korthikanti 2022", "Narayanan 2021"}
    assert {one.row["device"] for one in close} == {"h100", "a100"}
    for lowest, highest in ((5e8, 2e9), (5e9, 9e9), (6e10, 8e10)):  # about 1, 7 and 70 billion parameters
        assert any(lowest < one.job.model.num_parameters < highest for one in close)
    memory = [abs(error) for one in comparisons() if (error := one.memory_error_percent) is not None]
    assert sum(error <= CLOSE_PERCENT for error in memory) >= 4


def test_few_runs_are_fitted_and_their_shares_are_at_an_optimum():
    fitted = [one for one in comparisons() if one.row["use"] == "fit"]
    for device in ("h100", "a100"):
        errors = [one.error_percent for one in fitted if one.row["device"] == device]
        assert len(errors) == 4, "three shares are fitted on four rows"
        assert max(map(abs, errors)) < 2.0


def test_published_figures_are_counted_as_their_sources_count():
    # Narayanan et al. 2021, equation 3, in their own terms.
    layers, width, length, vocabulary, batch = 60, 10_240, 2048, 51_200, 1792
    flops = 96 * batch * length * layers * width**2
    flops *= 1 + length / (6 * width) + vocabulary / (16 * layers * width)
    one = the_row("Narayanan 2021", "gpt-76b", 1024)
    assert one.step_s == pytest.approx(flops / (140e12 * 1024), rel=0.01)
    # Korthikanti et al. 2022 state 51.4%, with attention to all positions: s/6h of the products, half of it here.
    one = the_row("Korthikanti 2022", "gpt-175b", 64, step_s=13.75)
    assert one.utilization == pytest.approx(0.514 * (1 - length / (12 * 12_288)), rel=0.01)
    # Llama 3's 43%, and 30 to 39% of torchtitan.
    assert the_row("Llama 3", "llama3.1-405b", 8192).utilization == pytest.approx(0.435, abs=0.005)
    assert 0.33 < the_row("torchtitan", "llama3.1-8b", 8, tokens_per_s=6667).utilization < 0.39
    # MPT and Megatron have two matrices of four widths; llm-foundry states the parameters, 2,048 positions included.
    for model, parameters in (("mpt-1b", 1_315_950_592), ("mpt-7b", 6_658_859_008), ("mpt-30b", 29_975_214_080)):
        size = next(one.job.model for one in comparisons() if one.row["model"] == model).num_parameters
        assert size == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize("num_devices", [1024, LLAMA_3_DEVICES])
def test_the_share_of_work_is_that_of_the_simulator(num_devices):
    mtbf_s, interval_s, share = work_share(num_devices)
    draw = random.Random(1)
    work_s = interval_s * round(3000 * mtbf_s / interval_s)  # about 3,000 interruptions
    periods = iter(lambda: Presence(draw.expovariate(1 / mtbf_s), 0.0), None)
    outcome = simulate(work_s, interval_s=interval_s, costs=ASSUMED_COSTS, periods=periods)
    assert outcome.num_interruptions > 2500
    assert work_s / outcome.wall_s == pytest.approx(share, rel=0.01)
    assert share > 0.9, "Llama 3's report states more than 90%"


def test_the_command_prints_the_table_of_the_documentation(capsys):
    table = published_table(comparisons())
    assert main(["plan", "published"]) == 0
    assert capsys.readouterr().out == table + "\n"
    page = Path(__file__).parents[3] / "docs" / "planning.md"
    assert table in page.read_text(encoding="utf-8"), "paste what `modelwright plan published` prints"
    assert main(["plan", "published", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(comparisons())
