import importlib
import json
import os
import re
import string
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError
from modelwright_claims import ledger, published, results
from modelwright_claims.activation_checkpointing import MEMORY_ERRORS
from modelwright_claims.claim import Claim, Measurement, Samples, Verdict, untestable
from modelwright_claims.command import prove
from modelwright_claims.judging import Judgment
from modelwright_claims.ledger import CLAIMS, pages, rejudge, select
from modelwright_claims.page import number, render, render_claim, show
from modelwright_claims.results import (
    all_figures,
    circumstances,
    judged,
    judged_for_page,
    machine_slug,
    measured,
    read_records,
    read_results,
    shown_kind,
    source_commit,
    write_record,
)
from modelwright_claims.statistics import estimate
from modelwright_plan.claims.planned_memory import PLANNED_HEAP_GAPS
from modelwright_plan.claims.planner_errors import planner_errors
from modelwright_plan.measured import measured_errors
from refusals import config_error

ROOT = Path(__file__).parents[3]
MEASUREMENT = Measurement(samples={"speed": [1.46, 1.54], "bytes": [3.0]}, conditions={"rows": 8})


def rule(limit: float):
    def judge(samples: Samples, conditions: object) -> Verdict:
        judgment = Judgment()
        speed = estimate(samples["speed"])
        judgment.figures["speed-up"] = speed.figure("x")
        judgment.figures["memory"] = estimate(samples["bytes"]).figure("MiB")
        judgment.said.append("as expected")
        judgment.check("speed", speed, limit, "x", ">=")
        return judgment.verdict()

    return judge


CLAIM = Claim(
    name="doubling",
    statement="It is twice as fast.",
    source="A. Author 2020",
    published="2x",
    compared="with against without",
    target="2x",
    measure=lambda setting: MEASUREMENT,
    judge=rule(2.0),
)
EASY = replace(CLAIM, target="1x", judge=rule(1.0))
"""An easier target, which the samples reach."""
QUIET = {"load_at_start": [0.1, 0.1, 0.1], "commit": "0123456789ab"}


def record_of(claim: Claim = CLAIM, *, quick: bool = False, **around):
    return measured(claim, MEASUREMENT, quick=quick, wall_s=1.0, around=circumstances() | QUIET | around)


@pytest.fixture
def written(tmp_path):
    def write(quick: bool = False, claim: Claim = CLAIM, **around) -> Path:
        return write_record(record_of(claim, quick=quick, **around), tmp_path)

    return write


def again(claim: Claim, record):
    return judged(claim, record)


def page_of(claim: Claim, *records) -> str:
    return render_claim(claim, [judged_for_page(claim, {results.FILE: "r.json", **record}) for record in records])


def overview(claim: Claim, *records) -> str:
    return render([claim], [judged_for_page(claim, record) for record in records], [])


def test_every_claim_says_what_it_says():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.statement.endswith(".")
        assert all((claim.source, claim.published, claim.compared, claim.target))


def test_words_of_conditions_name_constants_or_what_is_given_with_them():
    """A name that is neither would end a measurement after its last run."""
    texts = tomllib.loads((ROOT / "packages/claims/modelwright_claims/claims.toml").read_text(encoding="utf-8"))
    checked = 0
    for name, conditions in ((name, text["conditions"]) for name, text in texts.items() if "conditions" in text):
        module = importlib.import_module(f"modelwright_claims.{name}")
        (call,) = re.findall(r"described\(__name__(.*?)\)", Path(module.__file__ or "").read_text(encoding="utf-8"))
        given = set(re.findall(r", (\w+)=", call))
        roots = {
            re.split(r"[.\[]", field)[0]
            for form in conditions.values()
            for _, field, _, _ in string.Formatter().parse(form)
            if field is not None
        }
        assert given <= roots <= given | set(vars(module)), name
        known = {one: vars(module)[one] for one in roots - given}
        for form in conditions.values():
            if not given & {re.split(r"[.\[]", field)[0] for _, field, _, _ in string.Formatter().parse(form) if field}:
                assert form.format_map(known)
                checked += 1
    assert checked > 40


def test_selection_by_name():
    assert select([]) == list(CLAIMS)
    assert [claim.name for claim in select(["packing"])] == ["packing"]
    with config_error("nonsense", match=r"nonsense: is not a claim; the ledger has .*packing"):
        select(["nonsense"])


def test_a_record_says_where_when_and_how(written):
    record = json.loads(written(load_at_start=[0.5, 1.0, 1.5]).read_text())
    assert record["machine"]["processor"]
    assert record["machine"]["cores"] >= 1
    assert record["load_at_start"] == [0.5, 1.0, 1.5]
    assert record["threads"] >= 1
    assert record["versions"]["torch"]
    assert record["samples"] == {"speed": [1.46, 1.54], "bytes": [3.0]}
    assert record["published"] == "2x"
    assert record["kind"] == "short"
    assert record["judged"] == {"target": "2x"}
    speed, memory = record["figures"]["speed-up"], record["figures"]["memory"]
    assert (speed["value"], speed["unit"]) == (1.5, "x")
    assert speed["lower"] < 1.46 < 1.54 < speed["upper"]
    assert memory == {"value": 3.0, "unit": "MiB", "spread": 0.0}


def test_circumstances_are_those_of_the_machine():
    around = circumstances()
    assert len(around["load_at_start"]) == 3
    assert around["commit"] == source_commit()


def test_a_quick_measurement_never_replaces_a_full_one(written, tmp_path):
    quick, full = written(quick=True), written(quick=False)
    assert quick != full
    assert [record["quick"] for record in read_results(tmp_path)] == [False]
    assert len(read_records(tmp_path)) == 2


def test_a_quick_measurement_is_a_verdict_only_where_size_does_not_matter():
    decides = record_of(replace(EASY, quick_decides=True), quick=True)
    assert (decides["kind"], decides["reason"]) == ("quick: met", "as expected")
    quick_deciders = {claim.name for claim in CLAIMS if claim.quick_decides}
    assert quick_deciders == {"gradient_accumulation", "zero_memory", "planned_cost"}


def test_a_quick_measurement_is_no_verdict():
    quick = record_of(EASY, quick=True)
    assert (quick["kind"], quick["reason"]) == ("quick, not a verdict", "the rule gives met: as expected")
    assert ": quick, not a verdict |" in row_of(overview(EASY, quick))
    elsewhere = measured(EASY, untestable("no network"), quick=True, wall_s=1.0, around=circumstances() | QUIET)
    assert elsewhere["kind"] == "cannot be tested here"


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"x\.json: is not valid JSON"):
        read_results(tmp_path)


def row_of(page: str) -> str:
    [row] = [line for line in page.splitlines() if "[doubling](" in line]
    return row


def test_the_pages_put_the_published_figure_beside_ours():
    record = record_of()
    row = row_of(overview(CLAIM, record))
    assert row.startswith("| | 2x | speed-up 1.5 ")
    assert f'| <a id="doubling"></a>[doubling](claims/doubling.md): short | | {record["date"]} |' in row
    page = page_of(CLAIM, record)
    assert "A. Author 2020" in page
    assert "**Short**: speed 1.5x (lower bound" in page
    assert "| speed-up | 1.5 ± 0.05657 [1.247, 1.753] x |" in page
    assert "load 0.1 at the start on" in page
    assert "r.json" in page
    assert "Not measured yet" in page_of(CLAIM)
    assert "not measured yet" in overview(CLAIM)


def test_the_overview_shows_what_the_target_speaks_of():
    other = replace(CLAIM, headline=("gone since", "memory"))
    assert "| 2x | memory 3 MiB |" in overview(other, record_of(other))


@pytest.mark.parametrize("text", ["statement", "compared", "target"])
def test_a_verdict_on_another_claim_is_met_then_or_short_then_and_never_bold(text):
    for claim, kind in ((CLAIM, "short"), (EASY, "met")):
        record = record_of(claim)
        assert f"**{kind.capitalize()}**" in page_of(claim, record)
        later = replace(claim, **{text: "something else"})
        page = page_of(later, record)
        if (text, kind) == ("target", "short"):
            assert "**Short**: " in page, "samples that miss the present target"
            continue
        assert f"\n*{kind.capitalize()} then*: " in page
        assert f"- {text.capitalize()}, when this was measured: {getattr(claim, text)}\n" in page
        assert f"**{kind}" not in page.lower()
        assert f": {kind} then |" in row_of(overview(later, record))


def test_a_measurement_at_high_load_or_with_uncommitted_changes_is_marked():
    cores = circumstances()["machine"]["cores"]
    assert "load" not in row_of(overview(CLAIM, record_of(load_at_start=[cores, 9.0, 9.0])))
    loaded = record_of(load_at_start=[cores + 0.5, 0.0, 0.0])
    assert row_of(overview(CLAIM, loaded)).endswith(f"{loaded['date']}, load |")
    assert f"load {cores + 0.5} at the start on {cores} cores (**high**)" in page_of(CLAIM, loaded)
    dirty = record_of(commit="0123456789ab-dirty")
    assert row_of(overview(CLAIM, dirty)).endswith(", edits |")
    assert "commit 0123456789ab-dirty (**uncommitted changes**)" in page_of(CLAIM, dirty)


def test_changes_of_the_sources_are_seen_and_what_prove_writes_is_not(tmp_path):
    def git(*words: str) -> None:
        settings = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True)

    for folder in ("claims", "benchmarks/results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("claims/rule.py", "benchmarks/results/r.json", "docs/claims.md"):
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "m")
    clean = source_commit(tmp_path / "claims")
    assert len(clean) == 12
    for name in ("benchmarks/results/r.json", "docs/claims.md"):
        (tmp_path / name).write_text("2")
    assert source_commit(tmp_path / "claims") == clean
    (tmp_path / "claims/rule.py").write_text("2")
    assert source_commit(tmp_path / "claims") == f"{clean}-dirty"
    assert source_commit(tmp_path.parent) == ""


def test_judging_again_by_a_changed_rule_of_the_same_target_changes_the_verdict():
    before = record_of()
    after = again(replace(CLAIM, judge=rule(1.2)), before)
    assert (before["kind"], after["kind"]) == ("short", "met")
    assert after["judged"] == {"target": "2x"}
    assert {name: after[name] for name in ("samples", "conditions", "date", "commit", "target")} == {
        name: before[name] for name in ("samples", "conditions", "date", "commit", "target")
    }


def test_judging_again_changes_nothing():
    assert again(CLAIM, record_of()) == record_of()


def test_a_record_of_another_comparison_stays_met_only_while_its_samples_meet_the_present_rule():
    met, short = record_of(EASY), record_of(CLAIM)
    for text in ("statement", "compared"):
        assert again(replace(EASY, **{text: "another"}), met) == met
        assert again(replace(EASY, **{text: "another"}), short) == short, "nothing is won afterwards"
        missed = again(replace(CLAIM, **{text: "another"}), met)
        assert (missed["kind"], shown_kind(replace(CLAIM, **{text: "another"}), missed)) == ("short", "short then")
        assert missed["reason"].endswith(f"(by the rule of its time it was met: {met['reason']})")
    lacking = {**met, "samples": {"speed": met["samples"]["speed"]}}
    assert again(replace(EASY, compared="another"), lacking)["kind"] == "not judged"


def test_a_changed_target_can_only_take_a_verdict_away():
    met, short = record_of(EASY), record_of(CLAIM)
    assert again(EASY, short) == short  # a target that was fixed after measuring is not met
    assert shown_kind(EASY, short) == "short then"
    after = again(CLAIM, met)
    assert (after["kind"], shown_kind(CLAIM, after)) == ("short", "short")
    assert (after["target"], after["judged"]["target"]) == ("1x", "2x")
    assert again(CLAIM, after)["kind"] == "short"
    assert shown_kind(replace(CLAIM, target="3x"), after) == "short then"


def test_a_record_that_lacks_samples_is_not_judged_and_keeps_its_figures():
    before = record_of(EASY)
    del before["samples"]["bytes"], before["judged"]
    after = again(EASY, before)
    assert (after["kind"], after["reason"]) == ("not judged", "the record lacks samples 'bytes'")
    assert after["figures"] == {}
    assert after[results.MEASURED_FIGURES] == before["figures"]
    assert all_figures(after) == before["figures"]
    assert again(EASY, after) == after
    assert "| memory | 3 MiB |" in page_of(EASY, after)
    assert ": not judged |" in row_of(overview(EASY, after))


def test_figures_that_a_later_rule_no_longer_computes_are_dropped():
    renamed = replace(CLAIM, judge=lambda samples, conditions: Verdict(kind="short", reason="slow"))
    after = again(renamed, record_of())
    assert after["figures"] == {}
    assert results.MEASURED_FIGURES not in after


@pytest.fixture
def small_ledger(monkeypatch):
    monkeypatch.setattr(ledger, "CLAIMS", (CLAIM,))


def test_judging_writes_pages_and_no_record(tmp_path, small_ledger):
    old = record_of(EASY) | {"target": CLAIM.target}  # judged by an easier rule
    del old["judged"]
    path, page = write_record(old, tmp_path), tmp_path / "claims.md"
    stored = path.read_bytes()
    ((_, before, after),) = rejudge([], results=tmp_path, page=page)
    assert (before["kind"], after["kind"]) == ("met", "short")
    assert path.read_bytes() == stored
    assert ": short |" in row_of(page.read_text())
    assert "[Samples](../doubling-" in (tmp_path / "claims/doubling.md").read_text()


def test_the_command_judges_and_says_what_changed(tmp_path, small_ledger, capsys):
    write_record(record_of(EASY) | {"target": CLAIM.target, "judged": {"target": CLAIM.target}}, tmp_path)
    folder = ["--results", str(tmp_path)]
    assert prove(["--judge", *folder]) == 0
    assert "met -> short: speed 1.5x" in capsys.readouterr().out
    with config_error("prove"):
        prove(["--judge", "--quick", *folder])
    with config_error("nonsense", match="is not a claim"):
        prove(["--judge", "nonsense", *folder])
    with pytest.raises(ConfigError, match="is not a folder of results"):
        prove(["--judge", "--results", str(tmp_path / "none")])


def test_the_command_measures_into_a_folder_of_the_user_and_shows_what_was_published(
    tmp_path, small_ledger, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    row = published.Published(
        name="doubling", statement="s", num_promises=1, minutes=90.0, verdict="met", machine="another", date="d",
        figures={"speed-up": "2.1 x"},
    )  # fmt: skip
    monkeypatch.setattr(published, "read", lambda: [row])
    assert prove(["doubling"]) == 0
    shown = capsys.readouterr().out
    assert "short: speed 1.5x" in shown
    assert re.search(r"speed-up +2\.1 x +1\.5 ± 0\.05657 \[1\.247, 1\.753\] x", shown)
    (record,) = read_records(tmp_path / "claims-here")
    assert (record["kind"], record["samples"]) == ("short", dict(MEASUREMENT.samples))
    assert "doubling" in (tmp_path / "claims-here/claims.md").read_text()
    assert not (tmp_path / "docs").exists()
    assert prove(["--list"]) == 0
    assert re.search(r"doubling +90 min +met +s\nall together 1\.5 hours", capsys.readouterr().out)
    assert prove(["--all"]) == 0
    assert "1 claims, about 1.5 hours as published" in capsys.readouterr().out


def test_a_call_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    runs = list[str]()

    def claim(name: str) -> Claim:
        return replace(CLAIM, name=name, measure=lambda setting: runs.append(name) or MEASUREMENT)

    monkeypatch.setattr(results, "source_commit", lambda: QUIET["commit"])
    monkeypatch.setattr(ledger, "CLAIMS", (claim("first"),))
    assert prove(["first", "--results", str(tmp_path)]) == 0
    monkeypatch.setattr(ledger, "CLAIMS", (claim("first"), claim("second")))
    assert prove(["first", "second", "--results", str(tmp_path)]) == 0
    assert runs == ["first", "second"]
    monkeypatch.setattr(results, "source_commit", lambda: "another")
    assert prove(["first", "--results", str(tmp_path)]) == 0
    assert runs == ["first", "second", "first"], "other sources are measured again"
    assert len([record for record in read_records(tmp_path) if record["name"] == "first"]) == 2


def test_no_record_of_another_commit_or_machine_is_replaced(tmp_path):
    first = write_record(record_of(commit="a" * 12), tmp_path)
    assert write_record(record_of(commit="a" * 12), tmp_path) == first
    assert write_record(record_of(commit="b" * 12), tmp_path) != first
    other = record_of(commit="a" * 12)
    other["machine"]["memory_bytes"] = 1
    assert write_record(other, tmp_path) != first


def test_what_the_package_ships_follows_from_the_records_in_the_tree(monkeypatch, tmp_path):
    """Run `modelwright prove --judge` when this fails."""
    shipped = published.PATH.read_text(encoding="utf-8")
    monkeypatch.setattr(published, "PATH", tmp_path / "published.json")
    ledger.publish(ROOT / "benchmarks/results")
    assert (tmp_path / "published.json").read_text(encoding="utf-8") == shipped


MEASURED = {record["name"] for record in read_results(ROOT / "benchmarks/results")}


@pytest.mark.parametrize("claim", [one for one in CLAIMS if one.name in MEASURED], ids=lambda claim: claim.name)
def test_headlines_are_figures_that_were_measured(claim):
    """Headlines of claims without a record are checked where their verdicts are, on made-up samples."""
    records = [one for one in read_results(ROOT / "benchmarks/results") if one["name"] == claim.name]
    known = {name for one in records for name in all_figures(one) | judged_for_page(claim, one)["figures"]}
    to_be_measured = {"attention FLOPs with projections, dynamic to all heads", "speed-up over the faster FP32"}
    assert set(claim.headline) - known <= to_be_measured


def test_the_pages_lead_to_each_other_and_to_their_records():
    written = pages(ROOT / "benchmarks/results", ROOT / "docs/claims.md", aged=False)
    for path, text in written.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            place = Path(os.path.normpath(path.parent / target))
            assert place in written or place.is_file(), f"{path.name}: {target}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_the_pages_are_not_in_the_history():
    """`make docs` makes them, so that none can be old."""
    listed = subprocess.run(["git", "ls-files", "docs/claims*"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == ""


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
    one, other = (machine_slug(machine | {"model": model}) for model in ("25-17-1", "26-2-1"))
    assert one == "amd-epyc-tm-25-17-1-2c-avx2" != other, "two processors of one name"
    assert machine_slug(machine | {"accelerator": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"


def test_the_planner_ships_the_errors_that_were_measured():
    errors = planner_errors(read_results(ROOT / "benchmarks/results"))
    assert len(errors) >= 3
    assert measured_errors() == errors, "run: python -m modelwright_plan.claims.planner_errors"


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
