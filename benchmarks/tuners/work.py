"""One run of one tuner, in this process: `python work.py TASK.json TUNER OUT`; any interpreter that has the tuner.

Writes `OUT/measured.json`: rates, peak memory, first loss, versions.
"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

# At the end: a tuner's libraries look for packages that may be missing, and must not find benchmarks of the same name.
sys.path.append(str(Path(__file__).parents[1]))

import torch

from tuners.task import Task

TUNERS = {
    "Modelwright": "tuners.own",
    "TRL, packed": "tuners.trl_tuners",
    "TRL, padding-free": "tuners.trl_tuners",
    "TRL, padded": "tuners.trl_tuners",
    "TRL": "tuners.trl_tuners",
    "TRL 1.12": "tuners.trl_ppo",
}


def peak_bytes() -> int:
    """Returns the peak of resident memory. Not `ru_maxrss`, which begins with the peak of the process that started this
    one; nor the function of `modelwright.core.resources`, which TRL's environments do not have.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main(task_file: Path, name: str, out: Path) -> None:
    task = Task.load(task_file)
    tuner = importlib.import_module(TUNERS[name])
    torch.set_num_threads(task.threads)
    before = peak_bytes()
    measured = tuner.run(task, name, out)
    after = peak_bytes()
    packages = ("modelwright",) if name == "Modelwright" else ("trl", "peft", "transformers", "accelerate")
    versions = {one: importlib.metadata.version(one) for one in ("torch", *packages)}
    memory = {"peak_bytes": after, "peak_bytes_above_start": after - before}
    (out / "measured.json").write_text(json.dumps({**measured, **memory, "versions": versions}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
