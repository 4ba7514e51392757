"""Results on disk: one JSON file per claim and machine under `benchmarks/results/`.

A record holds the claim's texts as they were at the measurement, the samples and conditions, the circumstances, and the
verdict with the date and commit of the judging. No record is edited by hand: `judged` is the only way to a verdict. A
quick measurement has its own file (`-quick`), so that a smoke test never replaces a published figure.
"""

import dataclasses
import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.core.resources import git_commit, hardware, versions
from modelwright_claims.claim import Claim, Figure, Measurement, Verdict
from modelwright_claims.judging import judge

PACKAGES = ("modelwright", "torch", "numpy", "transformers", "lightning", "tokenizers")
TEXTS = ("name", "statement", "source", "published", "compared", "target", "headline")
"""The texts of a claim that its record repeats."""
DIRTY = "-dirty"
MADE_BY_PROVE = (":(top,exclude)benchmarks/results", ":(top,exclude)docs/claims.md", ":(top,exclude)docs/claims")
"""Files that measuring changes itself."""
FILE = "file"
"""The name of the file that a record was read from."""
ANSWERS_TODAY = "answers the present claim"
FIGURES, MEASURED_FIGURES = "figures", "figures_of_the_measurement"
"""Figures that the rule computes from the samples; and those of a record from before samples and rule were apart that
the rule does not compute: their samples were not kept, or another figure has taken their place."""


def machine() -> dict[str, Any]:
    """The traits of the machine that bear on speed: processor, instruction set, cores, memory, accelerator.

    Clouds call many processors by one name, which their family, model and stepping tell apart.
    """
    result = hardware() | {"instruction_set": torch.backends.cpu.get_cpu_capability()}
    with suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text()
        result["model"] = "-".join(re.findall(r"^(?:cpu family|model|stepping)\s*: (\d+)$", facts, re.MULTILINE)[:3])
    if torch.cuda.is_available():
        result["accelerator"] = torch.cuda.get_device_name()
    return result


def machine_slug(described: Mapping[str, Any]) -> str:
    """A short file-name form of a machine: `amd-epyc-2c-avx2`, or the accelerator's name where there is one."""
    traits = (
        described["processor"],
        described.get("model", ""),
        f"{described['cores']}c",
        described["instruction_set"],
    )
    return re.sub(r"[^a-z0-9]+", "-", str(described.get("accelerator", "-".join(traits))).lower()).strip("-")


def source_commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the sources, with "-dirty" when any file differs but those that `prove` writes; "" without one."""
    commit = git_commit(folder).removesuffix(DIRTY)
    command = ["git", "-C", str(folder), "status", "--porcelain", "--", ":(top)", *MADE_BY_PROVE]
    try:
        changed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        changed = ""
    return commit + DIRTY if commit and changed else commit


def circumstances() -> dict[str, Any]:
    """Machine, threads, load, versions, commit and date: what stands next to every published figure."""
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "versions": versions(*PACKAGES),
        "commit": source_commit(),
        "date": today(),
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def is_dirty(record: Mapping[str, Any]) -> bool:
    """Return whether the sources had changes that no commit holds when this was measured."""
    return record["commit"].endswith(DIRTY)


def is_of_now(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of the present sources: of the same clean commit, or of the version without git."""
    commit = source_commit()
    if commit or record["commit"]:
        return record["commit"] == commit and not is_dirty(record)
    return record["versions"].get("modelwright") == versions("modelwright").get("modelwright")


def is_loaded(record: Mapping[str, Any]) -> bool:
    """Return whether more processes than there are cores wanted to compute in the minute before this was measured."""
    return bool(record.get("load_at_start")) and record["load_at_start"][0] > record["machine"]["cores"]


def answers_present_claim(claim: Claim, record: Mapping[str, Any]) -> bool:
    """Return whether the verdict is one on the claim now: its statement, its comparison and its target."""
    return _same_comparison(claim, record) and record.get("judged", record)["target"] == claim.target


def shown_kind(claim: Claim, record: Mapping[str, Any]) -> str:
    """Return the verdict of a judged record in words: "met then" or "short then" when the claim has changed since.

    A record that decides nothing needs no such word.
    """
    kind = record["kind"]
    return kind if kind not in ("met", "short") or answers_present_claim(claim, record) else f"{kind} then"


def judged_for_page(claim: Claim, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record judged by the present rule, with every figure that the rule computes from its samples.

    The figures of a record whose verdict stays as it was then gain their bounds in this way.
    """
    after = judged(claim, record)
    today = {name: _as_json(figure) for name, figure in verdict_on(claim, record).figures.items()}
    return {**after, FIGURES: {**all_figures(after), **today}, ANSWERS_TODAY: answers_present_claim(claim, after)}


def answered_today(record: Mapping[str, Any]) -> bool:
    """Return whether a record from `judged_for_page` answers the claim now."""
    return record[ANSWERS_TODAY]


def newest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the newest record, a full measurement before a quick one; None without any. Of one day the last counts."""
    return max(enumerate(records), key=lambda one: (not one[1]["quick"], one[1]["date"], one[0]), default=(0, None))[1]


def all_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures of a record by name, those that only the measurement computed included."""
    return {**record.get(MEASURED_FIGURES, {}), **record[FIGURES]}


def measured(
    claim: Claim, measurement: Measurement, *, quick: bool, wall_s: float, around: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the judged record of a new measurement. around: `circumstances()` taken before measuring."""
    record = {
        **{name: getattr(claim, name) for name in TEXTS},
        "kind": "not judged",
        "reason": "",
        FIGURES: {},
        **dataclasses.asdict(measurement),
        "quick": quick,
        "wall_s": round(wall_s, 1),
        **around,
    }
    record = json.loads(json.dumps(record, default=float))  # what is judged is what is stored
    return judged(claim, record)


def judged(claim: Claim, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the verdict of the present rule on its samples. Its file is never written again.

    When the target has changed since the measurement, samples that miss the present one make the record short;
    samples that reach it prove nothing, as the target was not fixed before, and the verdict on the earlier target
    stays. A record of another statement or comparison keeps its verdict as well. Neither stays *met*, however, unless
    the present rule holds on the old samples.
    """
    verdict, is_same = verdict_on(claim, record), _same_comparison(claim, record)
    if record["kind"] == "met" != verdict.kind and not (is_same and record["target"] == claim.target):
        reason = f"{verdict.reason} (by the rule of its time it was met: {record['reason']})"
        return {**record, "kind": verdict.kind, "reason": reason, "judged": {"target": claim.target}}
    if not is_same or (record["target"] != claim.target and verdict.kind != "short"):
        return dict(record)
    figures = {name: _as_json(figure) for name, figure in verdict.figures.items()}
    earlier = record.get(MEASURED_FIGURES, {}) if "judged" in record else record[FIGURES]
    lost = {name: figure for name, figure in earlier.items() if name not in figures}
    after = {**record, "kind": verdict.kind, "reason": verdict.reason, FIGURES: figures, MEASURED_FIGURES: lost}
    if not lost:
        del after[MEASURED_FIGURES]
    return {**after, "judged": {"target": claim.target}}


def verdict_on(claim: Claim, record: Mapping[str, Any]) -> Verdict:
    """Judge samples and conditions of a record by the claim's present rule."""
    verdict = judge(claim, Measurement(samples=record["samples"], conditions=record["conditions"]))
    if record["quick"] and claim.quick_decides and verdict.kind in ("met", "short"):
        verdict = dataclasses.replace(verdict, kind="quick: met" if verdict.kind == "met" else "quick: short")
    elif record["quick"] and verdict.kind != "cannot be tested here":
        verdict = dataclasses.replace(verdict, kind="quick, not a verdict", reason=f"the rule gives {verdict.line}")
    return verdict


def record_path(record: Mapping[str, Any], folder: Path) -> Path:
    """Return the file of a record: that of its claim and machine, or one with its commit where another record has that.

    No measurement replaces that of another commit, and two machines with the same slug do not share a file.
    """
    quick = "-quick" if record["quick"] else ""
    path = folder / f"{record['name']}-{machine_slug(record['machine'])}{quick}.json"
    if path.exists() and _origin(json.loads(path.read_text(encoding="utf-8"))) != _origin(record):
        return path.with_stem(f"{path.stem}-{record['commit'] or record['date']}")
    return path


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """Write one record and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(record, folder)
    write_atomic(path, json.dumps(record, indent=1, default=float) + "\n")
    return path


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of claims in `folder`; files of other benchmarks are left out."""
    return [record for _, record in _read(folder)]


def _read(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArtifactError(f"{path}: is not valid JSON ({error}); measure that claim again") from None
        if isinstance(record, dict) and "statement" in record:
            yield path, record


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The records of `folder`, each with its file's name as `FILE`; where a machine has a full measurement of a claim,
    its quick one is left out.
    """
    records = [{**record, FILE: path.name} for path, record in _read(folder)]
    full = {_key(record) for record in records if not record["quick"]}
    return [record for record in records if not record["quick"] or _key(record) not in full]


def _same_comparison(claim: Claim, record: Mapping[str, Any]) -> bool:
    return all(record[text] == getattr(claim, text) for text in ("statement", "compared"))


def _as_json(figure: Figure) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(figure).items() if value is not None}
    return json.loads(json.dumps(fields, default=float))


def _origin(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["machine"], record["commit"]


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["name"], machine_slug(record["machine"])
