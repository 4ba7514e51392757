"""The page docs/performance.md from the records of `make bench`: speed and memory next to the best rival, in one run.

    python benchmarks/performance.py [--results FOLDER]     # prints the page
    python benchmarks/performance.py --minutes              # prints the parts of `make bench` and their last minutes

A row needs both sides in one record; of several records of an instruction set the newest counts. This file measures
nothing.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import versus

RESULTS = Path(__file__).parent / "results"
OWN = "Modelwright"
INSTRUCTION_SETS = ("AVX512", "AVX2")
CASES = {"sft": "fine-tuning", "lora": "fine-tuning with LoRA"}
STREAMS = ("decode, 1 stream", "decode, 8 streams", "decode, 32 streams", "prefill, 256 tokens")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task on one machine, with all repeats of both sides in `unit`."""

    task: str
    unit: str
    rival: str
    version: str
    own: Sequence[float]
    theirs: Sequence[float]
    peaks: tuple[float, float] | None = None
    """MiB of resident memory of both sides, where measured."""
    notes: tuple[str, str] = ("", "")
    """How both sides did it, or how well, where that may differ."""
    paired: bool = False
    """Whether the record's own ratio is the mean over pairs of runs; otherwise it is the ratio of the medians."""
    is_limited: bool = True
    """Whether `make bench ISA=avx2` limits the rival too. Libraries without such a setting go on with AVX-512."""

    @property
    def ratio(self) -> float:
        if self.paired:
            return statistics.mean(own / their for own, their in zip(self.own, self.theirs, strict=True))
        return statistics.median(self.own) / statistics.median(self.theirs)


Record = Mapping[str, Any]
HEAD = """# Speed and memory next to others

Written from records by `make docs`; `make bench` measures all of it on your machine. Both sides of a row ran in turn in
one measurement with equal numbers of threads. Figures are medians with the lowest and the highest run; the ratio is
that of the medians, for engines and servers the mean over pairs of runs. **Below 1 the rival is better.** The fastest
engine and the fastest of TRL's forms are shown; memory is that with AVX-512 where it was measured. The AVX2 columns may
come from a processor with AVX-512 by `make bench ISA=avx2`; a rival that cannot be limited in this way is marked "used
AVX-512".

| task | rival | AVX-512: Modelwright | rival | ratio | AVX2: Modelwright | rival | ratio | memory, MiB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
RECORDS = """
## Records

| record | machine | commit | date | load before | versions |
| --- | --- | --- | --- | --- | --- |"""


def fastest(sides: Mapping[str, Sequence[float]]) -> str:
    """The rival with the highest median."""
    return max(sides, key=lambda name: statistics.median(sides[name]))


def of_trainers(record: Record) -> Iterator[Row]:
    names = {
        "Hugging Face Trainer": "transformers", "Hugging Face Trainer, compiled": "transformers",
        "Lightning": "lightning", "nanoGPT": "torch",
    }  # fmt: skip
    speeds = {name: [run["tokens_per_s"] for run in runs] for name, runs in record["runs"].items()}
    peaks = {name: of["peak_bytes"] / 2**20 for name, of in record["summary"].items()}
    for rival in (name for name in speeds if name in names):
        yield Row(
            task=f"pretraining, {record['task']['compute'].upper()}, {versus.size_of(record['model'])} parameters",
            unit="tokens/s",
            rival=rival,
            version=record["versions"].get(names[rival], ""),
            own=speeds[OWN],
            theirs=speeds[rival],
            peaks=(peaks[OWN], peaks[rival]),
        )


def of_tuners(record: Record) -> Iterator[Row]:
    for one in record["rows"]:
        key = f"{one['unit']}_per_s"
        yield Row(
            task=f"{CASES.get(one['case'], one['case'].upper())}, {one['size']} parameters",
            unit=f"{one['unit']}/s",
            rival=one["peer"].removesuffix(" 1.12"),
            version=one["runs"][one["peer"]][0]["versions"].get("trl", ""),
            own=[run[key] for run in one["runs"][OWN]],
            theirs=[run[key] for run in one["runs"][one["peer"]]],
            peaks=(one["summary"][OWN]["peak_bytes"] / 2**20, one["summary"][one["peer"]]["peak_bytes"] / 2**20),
            # The fastest format of the instruction set, on both sides.
            notes=(one["compute"].upper(), one["compute"].upper()),
        )


def of_engines(record: Record) -> Iterator[Row]:
    """Yields the fastest other engine at each load, separately for 8 and 4 bits. ONNX Runtime and llama.cpp quantize
    activations to 8 bits; our 4-bit weights are compared with and without that.
    """
    samples: Mapping[str, Sequence[float]] = record["samples"]
    for load in STREAMS:
        for form, bits in (("INT8", "8"), ("INT4", "4"), ("INT4 with INT8 activations", "4")):
            own = samples.get(f"{load}, {OWN}, {form}")
            rivals = {
                name.removeprefix(f"{load}, "): values
                for name, values in samples.items()
                if name.startswith(load) and name.endswith(f", {bits} bits")
            }
            if own and rivals:
                rival = fastest(rivals)
                yield Row(
                    task=f"{form}, {load}",
                    unit="tokens/s",
                    rival=rival.removesuffix(f", {bits} bits"),
                    version=str(record["conditions"].get(f"version of {rival}", "")),
                    own=own,
                    theirs=rivals[rival],
                    paired=True,
                    is_limited=False,
                )


def of_servers(record: Record) -> Iterator[Row]:
    start, end = "largest rate, ", ", Poisson, 8 tokens"
    rates = {
        name.removeprefix(start).removesuffix(end): values
        for name, values in record["samples"].items()
        if name.startswith(start) and name.endswith(end)
    }
    for rival in (name for name in rates if not name.startswith("ours")):
        plain = rival.removesuffix(" 8 bits")
        versions = {name.lower().replace(" ", "-"): str(text) for name, text in record["conditions"].items()}
        yield Row(
            task="requests answered within 150 ms (99%), 8 tokens",
            unit="requests/s",
            rival="transformers, one at a time" if rival == "naive" else plain,
            version=versions.get(f"version-of-{plain.lower().replace(' ', '-')}", "").removeprefix("version: "),
            own=rates["ours INT8"],
            theirs=rates[rival],
            paired=True,
            is_limited=rival == "naive",
        )


def of_cleaners(record: Record) -> Iterator[Row]:
    """The names of rivals begin with that of their package; what follows is the form in which it was run."""
    packages = {name.removesuffix("-analyzer"): version for name, version in record["peers"].items()}
    for task, sides in record["tasks"].items():
        found = {name: f"recall {of['recall']:.2f}, precision {of['precision']:.2f}" for name, of in sides.items()}
        rates = {name: of.get("runs", [of["documents_per_cpu_s"]]) for name, of in sides.items()}
        own = OWN.lower()
        for rival in (name for name in sides if not name.startswith(own)):
            package = next((name for name in packages if rival.startswith(name)), "")
            yield Row(
                task=f"cleaning, {task}",
                unit="documents/CPU s",
                rival=rival,
                version=packages.get(package, ""),
                own=rates[own],
                theirs=rates[rival],
                notes=(found[own], found[rival]),
            )


PARTS: Mapping[str, Callable[[Record], Iterator[Row]]] = {
    "peers-fp32": of_trainers,
    "peers-bf16": of_trainers,
    "tuning-peers": of_tuners,
    "int8": of_engines,
    "serving_qps": of_servers,
    "cleaning_peers": of_cleaners,
}
"""The beginnings of the names of records, and how each is read: what `make bench` measures, in this order."""


def newest(results: Path) -> dict[tuple[str, str], Path]:
    """The newest record of each part for each instruction set."""
    found: dict[tuple[str, str], tuple[str, Path]] = {}
    for part in PARTS:
        for path in sorted(results.glob(f"{part}-*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            key = (part, record["machine"]["instruction_set"])
            if not record.get("quick") and record["date"] >= found.get(key, ("",))[0]:
                found[key] = (record["date"], path)
    return {key: path for key, (_, path) in found.items()}


def middle(values: Sequence[float], note: str = "") -> str:
    """Returns a median with the lowest and the highest value, in three digits or whole, and the note."""
    three = (min(values), statistics.median(values), max(values))
    low, median, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in three)
    spread = f"{low} to {high}" if len(values) > 1 else "one run"
    return f"{median} ({'; '.join(filter(None, [spread, note]))})"


def processor(record: Record) -> tuple[str, str]:
    """Returns the processor that a record is from; an older instruction set does not change it."""
    return record["machine"]["processor"], record["machine"].get("model", "")


def page(results: Path = RESULTS) -> str:
    """Returns the text of docs/performance.md. Links lead to the records as seen from there."""
    rows: dict[tuple[str, str, str], dict[str, Row]] = {}
    sources: list[str] = []
    paths = newest(results)
    records = {key: json.loads(path.read_text(encoding="utf-8")) for key, path in paths.items()}
    has_avx512 = {processor(record) for (_, instruction_set), record in records.items() if instruction_set == "AVX512"}
    for (part, instruction_set), record in records.items():
        path = paths[part, instruction_set]
        found = list(PARTS[part](record))
        if instruction_set != "AVX512" and processor(record) in has_avx512:
            found = [row if row.is_limited else replace(row, notes=("", "used AVX-512")) for row in found]
        for row in found:
            rows.setdefault((part, row.task, row.rival), {})[instruction_set] = row
        if found:
            machine, around = record["machine"], (record["commit"][:8], record["date"], record["load_at_start"][0])
            cells = [
                f"[{path.stem}](../benchmarks/results/{path.name})",
                f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}",
                *map(str, around),
                f"torch {record['versions']['torch']}",
            ]
            sources.append(f"| {' | '.join(cells)} |")
    lines = [HEAD]
    for (part, task, rival), sides in rows.items():
        anyone = next(iter(sides.values()))
        cells = [f"{task}, {anyone.unit}", f"{rival} {anyone.version}".strip()]
        for instruction_set in INSTRUCTION_SETS:
            row = sides.get(instruction_set)
            if row:
                cells += [middle(row.own, row.notes[0]), middle(row.theirs, row.notes[1]), f"**{row.ratio:.2f}**"]
            else:
                is_measured = any(key[:2] == (part, task) and instruction_set in of for key, of in rows.items())
                cells += ["another rival was faster" if is_measured else "not measured", "", ""]
        peaks = next((sides[name].peaks for name in INSTRUCTION_SETS if name in sides and sides[name].peaks), None)
        cells.append(f"{peaks[0]:,.0f} against {peaks[1]:,.0f}" if peaks else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *against_earlier(results), RECORDS, *sources]) + "\n"


EARLIER = """
## Next to an earlier commit

`python benchmarks/versus.py COMMIT` runs this checkout and an earlier one in turn; ratios are means over pairs of runs
with one-sided 95% bounds.
"""


def against_earlier(results: Path) -> Iterator[str]:
    """The lines about an earlier commit of each instruction set; none without a record."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("versus-*.json"))]
    if records:
        yield EARLIER
    for record in records:
        yield f"```text\n{chr(10).join(versus.table(record))}\n```\n"


def minutes(results: Path = RESULTS) -> str:
    """Returns the parts of `make bench` with the minutes that each took last time."""
    taken: dict[str, float] = {}
    for (part, _), path in newest(results).items():
        seconds = json.loads(path.read_text(encoding="utf-8")).get("wall_s")
        if seconds:
            taken[part] = max(taken.get(part, 0.0), seconds / 60)
    parts = [f"  {part}: {f'{taken[part]:.0f} minutes' if part in taken else 'not recorded'}" for part in PARTS]
    unknown = len(PARTS) - len(taken)
    more = f", and {unknown} parts whose time no record has" if unknown else ""
    return "\n".join([f"make bench takes about {sum(taken.values()):.0f} minutes{more}:", *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--minutes", action="store_true")
    options = parser.parse_args()
    print((minutes if options.minutes else page)(options.results), end="" if not options.minutes else "\n")


if __name__ == "__main__":
    main()
