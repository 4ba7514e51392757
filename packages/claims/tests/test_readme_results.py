"""The figures that README and docs/results.md quote are those of the records, with verdicts and conditions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelwright.model.hf import config_from_hf
from modelwright_claims import ledger, results
from modelwright_claims.results import all_figures, judged, shown_kind

ROOT = Path(__file__).parents[3]
CLAIMS = {claim.name: claim for claim in ledger.CLAIMS}
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "guides/formats.md"))
MACHINE = "amd-epyc-25-17-1-2c-avx512"
"""The machine whose records of `make bench` are quoted; the figures of a claim come from its newest record."""
OLDER_MACHINE = "amd-epyc-2c-avx2"
CONDITIONS_WITH_UNITS = {"50%"}
"""Numbers of the table that are a condition and not a figure of a record: the garbage in the stream."""


def section(title: str) -> str:
    """The text below a heading of the pages, up to the next heading, as one line for each paragraph or row."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGES, flags=re.MULTILINE | re.DOTALL)
    assert match, title
    return re.sub(r"(?<=[^\n|])\n(?=[^\n|])", " ", match[1])


def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8"))


def newest(claim: str) -> dict[str, Any]:
    """The newest record of a claim on any machine, as the page of claims has it."""
    paths = sorted((ROOT / "benchmarks/results").glob(f"{claim}-*.json"))
    found = results.newest([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    assert found, claim
    return dict(found)


def figures(claim: str, machine: str = "") -> dict[str, float]:
    found = record(f"{claim}-{machine}") if machine else newest(claim)
    return {name: figure["value"] for name, figure in all_figures(found).items()}


def technique_rows() -> dict[str, tuple[str, str, str]]:
    """The table of techniques by claim: measured figures, verdict, conditions."""
    row = r"^\| [^|]+ \| ([^|]+) \| \[([\w ]+)\]\(claims\.md#(\w+)\)[^|]* \| ([^|]+) \|$"
    rows = re.findall(row, section("Results"), flags=re.MULTILINE)
    return {claim: (measured, verdict, conditions) for measured, verdict, claim, conditions in rows}


def bf16_figures() -> list[str]:
    values = figures("bf16_mixed")
    return [
        f"{values['speed-up over the faster FP32']:.1f} times the speed of the faster FP32",
        f"{values['speed-up']:.1f} times that of PyTorch's own",
        f"{values['memory saved, 16 rows']:.0f}% less memory",
    ]


def adaptive_figures() -> list[str]:
    values = figures("adaptive_precision")
    rules = values["speed over FP32, rules"]
    return [
        f"{rules:.1f} times the speed of FP32",
        f"{rules / values['speed over FP32, fp32 by oneDNN']:.1f} times that of FP32 with oneDNN",
        f"{values['memory saved, rules']:.0f}% less memory",
        f"{values['speed over FP32, all INT8, BF16 stream']:.1f} times",
        f"{values['memory saved, all INT8, BF16 stream']:.0f}% less memory",
        f"{values['held-out loss above FP32, rules']:+.1f}%",
    ]


def sparse_figures() -> list[str]:
    values = figures("sparse_updates")
    clean, dense = (values[f"held-out loss, {arm}, clean continual update"] for arm in ("rows by change", "dense"))
    return [
        f"{values['executed FLOPs, method to dense']:.2f} of the FLOPs",
        f"{values['time of a step, method to dense']:.2f} of the time of a step",
        f"{-values['held-out loss above dense']:.1f}% below dense",
        f"{100 * (clean / dense - 1):.1f}% above dense",
    ]


def stack_figures() -> list[str]:
    values = figures("efficiency_20x")
    one, two = (values[f"{hosts}: faster, everything"] for hosts in ("one host", "two hosts"))
    fastest = [values[f"{hosts}: faster than the fastest plain loop"] for hosts in ("one host", "two hosts")]
    return [
        f"{one:.1f} times on one host",
        f"{two:.1f} times on two hosts",
        "{:.1f} and {:.1f} times as fast".format(*fastest),
    ]


QUOTED = {
    "bf16_mixed": bf16_figures,
    "adaptive_precision": adaptive_figures,
    "sparse_updates": sparse_figures,
    "efficiency_20x": stack_figures,
}


@pytest.mark.parametrize("claim", QUOTED)
def test_the_table_quotes_the_figures_of_the_record(claim: str) -> None:
    """It quotes each of them, rounded as here, and no other figure; the verdict is the record's."""
    measured, verdict, conditions = technique_rows()[claim]
    assert verdict == shown_kind(CLAIMS[claim], judged(CLAIMS[claim], newest(claim)))
    quoted, expected = f"{measured} {conditions}", QUOTED[claim]()
    assert [figure for figure in expected if figure not in quoted] == []
    numbers = set(re.findall(r"[-+]?\d[\d.]*(?:%| times| of the)", quoted)) - CONDITIONS_WITH_UNITS
    assert [number for number in numbers if not any(number in figure for figure in expected)] == []


def test_every_row_of_the_table_is_checked() -> None:
    rows = [line for line in section("Results").splitlines() if line.startswith("| ")]
    assert len(rows) - 2 == len(technique_rows())
    assert set(technique_rows()) == set(QUOTED)


def test_conditions_of_the_table_are_those_of_the_records() -> None:
    rows = technique_rows()
    adaptive, sparse, stack = (
        newest(claim)["conditions"] for claim in ("adaptive_precision", "sparse_updates", "efficiency_20x")
    )
    assert adaptive["pace"].startswith("39331968 parameters")
    assert "39 million parameters" in rows["adaptive_precision"][2]
    assert f"{adaptive['parameters'] / 1e6:.1f} million parameters" in rows["adaptive_precision"][2]
    assert f"{sparse['parameters'] / 1e6:.1f} million parameters" in rows["sparse_updates"][2]
    assert "50% garbage" in sparse["regimes"]
    assert "50% of the stream is garbage" in rows["sparse_updates"][2]
    assert f"({stack['parameters'] / 1e6:.1f} million parameters)" in rows["efficiency_20x"][0]


def test_what_memory_means_is_said_beside_the_figures() -> None:
    for claim, rows in (("bf16_mixed", "16 and 32 rows"), ("adaptive_precision", "16 rows")):
        assert rows in newest(claim)["conditions"]["memory"]
        assert "without gaps of the heap" in newest(claim)["conditions"]["memory"]
    (words,) = (line for line in section("Results").splitlines() if line.startswith("- *Memory*"))
    assert "16 rows of 512 tokens" in words
    assert "without fragmentation of the heap" in words
    assert "resident memory of the whole process falls by a smaller share" in words


def test_the_tables_of_other_trainers_are_those_of_the_benchmark() -> None:
    text = section("Other trainers")
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("| ")]
        for part in text.split("In BF16")
    ]
    trained = [record(f"peers-{compute}-{MACHINE}") for compute in ("fp32", "bf16")]
    for rows, found in zip(tables, trained, strict=True):
        own = found["summary"]["Modelwright"]
        assert rows[2:] == [
            [
                name.replace("Trainer", "`Trainer`"),
                f"{summary['tokens_per_s']:,.0f}",
                "" if own is summary else f"{own['tokens_per_s'] / summary['tokens_per_s']:.2f} times as fast",
                f"{summary['peak_bytes'] / 2**20:,.0f} MiB",
                f"{summary['heldout_loss']:.4f}",
            ]
            for name, summary in found["summary"].items()
        ]
        task = found["task"]
        assert f"{task['num_steps']} steps of {task['batch_rows'] * task['seq_len']:,} tokens" in text
        assert f"the first {task['warmup_steps']} are not timed" in text
        assert f"commit {found['commit'][:7]}" in text
    assert f"up to {max(one['spread'] for found in trained for one in found['summary'].values()):.0%}" in text


def test_speeds_of_number_formats_are_those_of_the_records() -> None:
    """Two records have the bare products of the older machine; the page gives the range over both."""
    text = section("Number formats")
    records = [figures(claim, OLDER_MACHINE) for claim in ("precision_policies", "adaptive_precision")]
    for formats in (("bf16", "fp16"), ("fp8", "int8")):
        speeds = [values[f"bare products over FP32, {name}"] for values in records for name in formats]
        assert f"{min(speeds):.2f} to {max(speeds):.2f} times" in text
    onednn = figures("adaptive_precision")["speed over FP32, fp32 by oneDNN"]
    assert f"{onednn:.1f} times as fast with oneDNN" in " ".join(text.split())


def test_the_readme_quotes_the_records() -> None:
    """Each row of its table, rounded as here; it has no other row."""
    trained = record(f"peers-bf16-{MACHINE}")
    speeds = {name: summary["tokens_per_s"] for name, summary in trained["summary"].items()}
    loop, compiled, plain = (
        speeds["Modelwright"] / speeds[name]
        for name in ("nanoGPT", "Hugging Face Trainer, compiled", "Hugging Face Trainer")
    )
    assert f"{config_from_hf(trained['model']).num_parameters / 1e6:.1f} million parameters" in README
    tuned = {(row["case"], row["size"]): row["ratio"] for row in record(f"tuning-peers-{MACHINE}")["rows"]}
    near = record(f"cleaning_peers-{MACHINE}")["tasks"]["near-duplicates"]
    ours, theirs = near["modelwright"], near["datatrove"]
    assert all(ours[quality] > theirs[quality] for quality in ("recall", "precision"))
    served, stack = figures("serving_qps"), figures("efficiency_20x")
    expected = [
        f"{loop:.2f} times nanoGPT's loop, {compiled:.2f} and {plain:.2f} times Hugging Face `Trainer`",
        f"{tuned['sft', '8.6M']:.2f} and {tuned['sft', '95M']:.2f} times TRL",
        "{:.2f}, {:.2f} and {:.2f} times TRL".format(*(tuned[case, "95M"] for case in ("dpo", "grpo", "ppo"))),
        f"{ours['documents_per_cpu_s'] / theirs['documents_per_cpu_s']:.1f} times datatrove",
        f"{served['times the rate of llama.cpp 8 bits, INT8']:.2f} times llama.cpp; "
        f"{served['times the naive rate, INT8']:.0f} times one request at a time; "
        f"p99 grows {served['overload: p99 of accepted answers, times that at the largest rate']:.1f}-fold in overload",
        f"{stack['one host: faster than the fastest plain loop']:.1f} times the fastest plain loop",
    ]
    rows = [line for line in README.splitlines() if line.startswith("| ") and "](" in line]
    table = rows[: len(expected)]
    assert [figure for figure, row in zip(expected, table, strict=True) if figure not in row] == []
    for claim, row in zip(("serving_qps", "efficiency_20x"), table[-2:], strict=True):
        verdict = shown_kind(CLAIMS[claim], judged(CLAIMS[claim], newest(claim)))
        assert ("| short: " in row) == verdict.startswith("short"), "what is short looks like no success"
    assert "| you want to | read |" in README.partition(table[-1])[2]
