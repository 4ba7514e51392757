"""Losses and final weights of every wired case, before and after a change that must not change a bit.

golden_run.py record FILE     run all cases on two processes and write their losses, gradient norms and weights' digests
golden_run.py compare FILE    run them again and name every case that differs; exits with 1 if one does

Cases whose order of updates depends on timing (Hogwild) are not among them. Run it on one machine: other processors
round differently.
"""

import hashlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from wired_cases import Runs

MODULES = ("test_wired", "test_wired_in_backward", "test_wired_updates", "test_wired_precision", "test_wired_sparse")
METRICS = ("loss", "grad_norm", "heldout_loss", "skipped")
Golden = dict[str, dict[str, Any]]


def run_all(folder: Path) -> Golden:
    found: Golden = {}
    for name in MODULES:
        module = importlib.import_module(name)
        (folder / name).mkdir()
        if name == "test_wired_precision":
            module.write_speeds(folder / name)
        runs = Runs(folder / name, module.CASES)
        for case in module.CASES:
            found[f"{name}/{case['name']}"] = outcome(runs.folder(case["name"]), case["name"])
        print(f"{name}: {len(module.CASES)} cases", flush=True)
    return found


def outcome(folder: Path, name: str) -> dict[str, Any]:
    """What a case left: how it ended, its metrics so far in this folder, the weights of both ranks."""
    ended = json.loads((folder / f"{name}-0.json").read_text())
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        "kind": ended["kind"],
        "metrics": [{key: repr(record[key]) for key in METRICS if key in record} for record in records],
        "weights": [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob(f"{name}-*.safetensors"))
        ],
    }


def main() -> int:
    command, path = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(Path(folder))
    if command == "record":
        path.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(path.read_text())
    different = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    for name in sorted(different):
        parts = [
            key
            for key in ("kind", "metrics", "weights")
            if before.get(name, {}).get(key) != found.get(name, {}).get(key)
        ]
        print(f"{name}: {', '.join(parts)} differ")
    print(f"{len(found) - len(different)} of {len(found)} cases are equal to the bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
