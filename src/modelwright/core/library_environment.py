"""Environment variables that PyTorch's libraries read when they are loaded: the time that idle OpenMP threads spin, and
the instruction sets that are used.

`modelwright/__init__.py` sets them, so `import modelwright` has to come before `import torch`; processes started later
inherit them. `python -m modelwright.core.print_environment` prints them for `env`, to start any other program with.
"""

import os
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass

from modelwright.core.config import ConfigError

SWITCH = "MODELWRIGHT_ISA"
"""Environment variable with the name of an older instruction set that this process is restricted to."""
SPIN_COUNT = "5000"
"""Turns of libgomp's loop in which a thread waits actively before it sleeps. With libgomp's own 300,000, threads that
wait keep the core from the one that they wait for, wherever another process keeps the machine busy; with 1,000 they
sleep between the operators of a small step, and waking them takes a sixth of it (docs/log/speed.md)."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of torch.compile's kernels."""
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """An instruction set that a newer processor can be restricted to."""

    march: str
    """Architecture for the compiler option `-march`."""
    variables: dict[str, str]
    """Environment variables that restrict PyTorch's operators, oneDNN, MKL and FBGEMM. FBGEMM's oldest kernels are for
    AVX2."""


LOWER: dict[str, InstructionSet] = {
    "avx2": InstructionSet(
        march="x86-64-v3",
        variables={
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "x86-64": InstructionSet(
        march="x86-64",
        variables={
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}


def lowered(environment: MutableMapping[str, str] = os.environ) -> InstructionSet | None:
    """Returns the instruction set that `SWITCH` names; None if this process uses its processor's own."""
    name = environment.get(SWITCH, "")
    if not name:
        return None
    if name not in LOWER:
        raise ConfigError(f"{SWITCH}: unknown instruction set {name!r}; choose from {', '.join(LOWER)}, or unset it")
    return LOWER[name]


def prepare(environment: MutableMapping[str, str] = os.environ, *, is_too_late: bool) -> None:
    """Set the variables, except a wait policy that the user has set. is_too_late: the libraries are loaded, so the
    variables must have been set before.
    """
    wanted = lowered(environment)
    if wanted is not None:
        unset = [name for name, value in wanted.variables.items() if environment.get(name) != value]
        # The libraries read the variables once, when they are loaded.
        if is_too_late and unset:
            raise ConfigError(
                f"{SWITCH}: torch was imported before modelwright and has not seen {', '.join(unset)}; start the "
                "program with env $(python -m modelwright.core.print_environment)"
            )
        environment.update(wanted.variables)
    _set_compiled_kernels_folder(environment)
    if not any(name in environment for name in WAIT_POLICIES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def _set_compiled_kernels_folder(environment: MutableMapping[str, str]) -> None:
    """Give each instruction set a folder of its own. PyTorch 2.13 takes a kernel that it compiled for AVX-512 for one
    with AVX2, and FlexAttention's results are then wrong (docs/log/precision-and-memory.md).
    """
    folder, name = environment.get(COMPILED), environment.get(SWITCH)
    if folder is None and not name:
        return
    folder = folder or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    for other in LOWER:  # inherited from a process with another instruction set
        folder = folder.removesuffix(f"_{other}")
    environment[COMPILED] = f"{folder}_{name}" if name else folder
