"""Which kernels for CPUs a run computes with: decided once, written into its run.json, the same on all of its
processes, and kept when it is resumed, so that its bits stay the same.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modelwright.core.errors import ArtifactError
from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir
from modelwright.ops import cpu_kernels
from modelwright.ops.kernel_speed import KERNELS
from modelwright.parallel.mesh import World


@contextmanager
def kernels_of_run(run: RunDir, world: World, progress: Progress) -> Iterator[Mapping[str, Any]]:
    """Within the block all ranks use the kernels that the first one decides on, what they start included. Yields
    `{"instruction_set", "used"}` of the first rank, for run.json.
    """
    choices = world.gather_json(_choice(run, progress))
    choice = choices[0]
    if others := {other["instruction_set"] for other in choices} - {choice["instruction_set"]}:
        names = ", ".join(sorted(_shown(name) for name in others))
        progress.note(f"kernels: ranks compute with {_shown(choice['instruction_set'])} and {names}")
    variables = cpu_kernels.as_setting(choice["used"])
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield choice
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _choice(run: RunDir, progress: Progress) -> dict[str, Any]:
    """What the run used last, on the same instruction set; else what is faster here. The user's own setting wins."""
    now = {"instruction_set": cpu_kernels.instruction_set(), "used": sorted(cpu_kernels.used())}
    last = _last_choice(run)
    if last is None or last == now:
        return now
    if last["instruction_set"] != now["instruction_set"]:
        before, here = _shown(last["instruction_set"]), _shown(now["instruction_set"])
        progress.note(f"kernels: the run began with {before} and goes on with {here}; the last bits of results differ")
        return now
    if cpu_kernels.SWITCH in os.environ:
        progress.note(f"kernels: {cpu_kernels.SWITCH} differs from what the run used; the last bits of results differ")
        return now
    return {**now, "used": [name for name in last["used"] if name in KERNELS]}


def _last_choice(run: RunDir) -> dict[str, Any] | None:
    """That of the run's last invocation; None for a new run and for one of an earlier version."""
    try:
        invocations = run.read_info()["invocations"]
    except ArtifactError:
        return None
    return next((entry["kernels"] for entry in reversed(invocations) if "kernels" in entry), None)


def _shown(instruction_set: str) -> str:
    return instruction_set or "no kernels"
