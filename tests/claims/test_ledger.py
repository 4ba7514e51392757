import json
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.plan.measured import measured_errors
from modelwright_claims.activation_checkpointing import MEMORY_ERRORS
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.ledger import CLAIMS, listing, select
from modelwright_claims.page import number, render, show
from modelwright_claims.planned_memory import PLANNED_HEAP_GAPS
from modelwright_claims.planner_errors import planner_errors
from modelwright_claims.results import circumstances, machine_slug, read_results, write_result

ROOT = Path(__file__).parents[2]


def measure(setting: Setting) -> Result:
    figures = {
        "speed-up": Figure(value=1.5, unit="x", spread=0.04),
        "memory": Figure(value=3.0, unit="MiB"),
    }
    return Result(
        kind="short", reason="by 0.5x", figures=figures, conditions={"rows": 8}, samples={"speed": [1.0, 2.0]}
    )


CLAIM = Claim(
    name="doubling",
    statement="It is twice as fast.",
    source="A. Author 2020",
    published="2x",
    compared="with against without",
    target="2x",
    measure=measure,
)


@pytest.fixture
def written(tmp_path):
    def write(quick: bool) -> Path:
        result = measure(Setting(quick=quick, folder=tmp_path, progress=None))  # type: ignore[arg-type]
        return write_result(CLAIM, result, quick=quick, wall_s=1.0, around=circumstances(), folder=tmp_path)

    return write


def test_every_claim_says_what_it_says():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) == len(listing())
    for claim in CLAIMS:
        assert claim.statement.endswith(".")
        assert all((claim.source, claim.published, claim.compared, claim.target))


def test_selection_by_name():
    assert select([]) == list(CLAIMS)
    assert [claim.name for claim in select(["packing"])] == ["packing"]
    with pytest.raises(ConfigError, match=r"nonsense: is no claim; the ledger has .*packing"):
        select(["nonsense"])


def test_a_record_says_where_when_and_how(written):
    record = json.loads(written(quick=False).read_text())
    assert record["machine"]["processor"]
    assert record["threads"] >= 1
    assert record["versions"]["torch"]
    assert record["samples"] == {"speed": [1.0, 2.0]}
    assert record["figures"]["speed-up"] == {"value": 1.5, "unit": "x", "spread": 0.04}
    assert record["published"] == "2x"


def test_a_quick_measurement_never_replaces_a_full_one(written, tmp_path):
    quick, full = written(quick=True), written(quick=False)
    assert quick != full
    assert [record["quick"] for record in read_results(tmp_path)] == [False]


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"x\.json: is not valid JSON"):
        read_results(tmp_path)


def test_the_page_puts_the_published_figure_beside_ours(written, tmp_path):
    written(quick=False)
    page = render([CLAIM], read_results(tmp_path))
    [row] = [line for line in page.splitlines() if line.startswith("| [doubling]")]
    assert row.startswith("| [doubling](#doubling) | 2x | speed-up 1.5 ± 0.04 x; memory 3 MiB | ")
    assert row.endswith(" | **short** |")
    assert "A. Author 2020" in page
    assert "**Short**: by 0.5x" in page
    assert "not measured yet" in render([CLAIM], [])


def test_the_overview_shows_what_the_target_speaks_of(written, tmp_path):
    written(quick=False)
    other = replace(CLAIM, headline=("gone since", "memory"))
    assert "| 2x | speed-up 1.5 ± 0.04 x; memory 3 MiB |" in render([CLAIM], read_results(tmp_path))
    assert "| 2x | memory 3 MiB |" in render([other], read_results(tmp_path))


def test_the_page_says_what_was_compared_when_it_was_measured(written, tmp_path):
    written(quick=False)
    later = replace(CLAIM, target="at least 9x", compared="something else")
    assert "when this was measured" not in render([CLAIM], read_results(tmp_path))
    page = render([later], read_results(tmp_path))
    assert f"- Target, when this was measured: {CLAIM.target}\n" in page
    assert f"- Compared, when this was measured: {CLAIM.compared}\n" in page


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_headlines_are_figures_that_were_measured(claim):
    records = [one for one in read_results(ROOT / "benchmarks/results") if one["name"] == claim.name]
    assert set(claim.headline) <= {name for record in records for name in record["figures"]}


def test_the_page_in_the_tree_is_the_generated_one():
    assert (ROOT / "docs/claims.md").read_text() == render(CLAIMS, read_results(ROOT / "benchmarks/results"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.23456, "1.235"), (2.3e-16, "2.3e-16"), (45678.9, "45,679"), (float("inf"), "inf")],
)
def test_numbers_carry_the_digits_that_mean_something(value, text):
    assert number(value) == text
    assert show({"value": value, "spread": 0.0, "unit": ""}) == text


def test_machines_have_file_names():
    machine = {"processor": "AMD EPYC(TM)", "cores": 2, "instruction_set": "AVX2"}
    assert machine_slug(machine) == "amd-epyc-tm-2c-avx2"
    assert machine_slug(machine | {"accelerator": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"


def test_the_planner_ships_the_errors_that_were_measured():
    errors = planner_errors(read_results(ROOT / "benchmarks/results"))
    assert len(errors) >= 3
    assert measured_errors() == errors, "run: python -m modelwright_claims.planner_errors"


def test_planner_errors_leave_out_quick_measurements_and_other_claims():
    record = {
        "name": "zero_memory",
        "samples": {MEMORY_ERRORS: [1.0, -6.041]},
        "figures": {PLANNED_HEAP_GAPS: {"value": 73.54}, "another": {"value": 1.0}},
        "machine": {"processor": "P"},
        "date": "d",
        "quick": False,
    }
    (error,) = planner_errors([record, record | {"quick": True}, record | {"samples": {}}])
    assert (error.claim, error.processor, error.date) == ("zero_memory", "P", "d")
    assert (error.num_predictions, error.max_error_percent) == (2, 6.04)
    assert error.heap_gap_percent == {"as planned": 73.5}
