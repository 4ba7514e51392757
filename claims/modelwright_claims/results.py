"""Results on disk: one JSON file per claim and machine under `benchmarks/results/`.

A quick measurement has its own file (`-quick`), so that a smoke test never replaces a published figure. Knows nothing
about how a figure came about.
"""

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.core.resources import git_commit, hardware, versions
from modelwright_claims.claim import Claim, Result

PACKAGES = ("modelwright", "torch", "numpy", "transformers", "lightning", "tokenizers")


def machine() -> dict[str, Any]:
    """The machine as far as it bears on speed: processor, instruction set, cores, memory, accelerator."""
    found = hardware() | {"instruction_set": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def machine_slug(described: Mapping[str, Any]) -> str:
    """A short file-name form of a machine: `amd-epyc-2c-avx2`, or the accelerator's name where there is one."""
    processor = f"{described['processor']}-{described['cores']}c-{described['instruction_set']}"
    return re.sub(r"[^a-z0-9]+", "-", str(described.get("accelerator", processor)).lower()).strip("-")


def circumstances() -> dict[str, Any]:
    """Machine, threads, versions, commit and date: what stands beside every published figure."""
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "versions": versions(*PACKAGES),
        "commit": git_commit(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write_result(
    claim: Claim, result: Result, *, quick: bool, wall_s: float, around: Mapping[str, Any], folder: Path
) -> Path:
    """Write one claim's outcome and return the file. `around`: `circumstances()` taken before measuring."""
    described = {
        field.name: getattr(claim, field.name) for field in dataclasses.fields(Claim) if field.name != "measure"
    }
    record = {**described, **dataclasses.asdict(result), "quick": quick, "wall_s": round(wall_s, 1), **around}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{claim.name}-{machine_slug(around['machine'])}{'-quick' if quick else ''}.json"
    write_atomic(path, json.dumps(record, indent=1, default=float) + "\n")
    return path


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All claim results in `folder`, by claim and machine; files of other benchmarks are left out.

    Where a machine has a full measurement of a claim, its quick one is left out.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArtifactError(f"{path}: is not valid JSON ({error}); measure that claim again") from None
        if isinstance(record, dict) and "statement" in record:
            records.append(record)
    full = {_key(record) for record in records if not record["quick"]}
    return [record for record in records if not record["quick"] or _key(record) not in full]


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["name"], machine_slug(record["machine"])
