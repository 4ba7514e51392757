"""What PyTorch's libraries read when they are loaded: set before that, inherited, and the user's own values kept."""

import json
import os
import subprocess
import sys

import pytest

from modelwright.core.library_environment import COMPILED, LOWER, SPIN_COUNT, SWITCH, lowered, prepare
from refusals import config_error

SEEN = """
import modelwright, json, os, torch
from modelwright.ops import cpu_kernels, matmul
print(json.dumps([torch.backends.cpu.get_cpu_capability(), cpu_kernels.instruction_set(),
                  len(matmul.CPU_MULTIPLIES), os.environ.get("GOMP_SPINCOUNT")]))
"""


def seen(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "MODELWRIGHT_"))}
    environment = {**inherited, "PYTHONPATH": ":".join(sys.path), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_threads_sleep_soon_unless_the_user_has_said_how_they_wait():
    for variables in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        environment = dict(variables)
        prepare(environment, is_too_late=False)
        assert environment == (variables or {"GOMP_SPINCOUNT": SPIN_COUNT})


def test_an_older_instruction_set_holds_every_library_to_it():
    environment = {SWITCH: "avx2"}
    with config_error("MODELWRIGHT_ISA", match=r"imported before modelwright and has not seen ATEN_CPU_CAPABILITY"):
        prepare(environment, is_too_late=True)
    prepare(environment, is_too_late=False)
    assert environment.items() >= LOWER["avx2"].variables.items()
    prepare(environment, is_too_late=True)  # a process that has inherited them
    with config_error("MODELWRIGHT_ISA", match=r"unknown instruction set 'avx3'; choose from avx2, x86-64"):
        lowered({SWITCH: "avx3"})
    assert lowered({}) is None


def test_each_instruction_set_has_a_folder_of_compiled_kernels():
    """PyTorch takes one compiled for AVX-512 for one with AVX2."""
    environment = {SWITCH: "avx2"}
    prepare(environment, is_too_late=False)
    folder = environment[COMPILED]
    assert folder.endswith("_avx2")
    for instruction_set, expected in [("avx2", folder), ("x86-64", f"{folder.removesuffix('avx2')}x86-64"),
                                      ("", folder.removesuffix("_avx2"))]:  # fmt: skip
        environment[SWITCH] = instruction_set  # a process that has inherited the rest
        prepare(environment, is_too_late=False)
        assert environment[COMPILED] == expected


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 only")
def test_a_process_on_plain_x86_64_has_no_wide_vectors_and_multiplies_no_narrow_format():
    done = seen(SEEN, **{SWITCH: "x86-64"})
    assert done.returncode == 0, done.stderr
    capability, kernels, num_formats, spins = json.loads(done.stdout)
    assert (capability, num_formats, spins) == ("DEFAULT", 0, SPIN_COUNT)
    assert kernels in ("x86-64", "")


@pytest.mark.slow
def test_programs_are_started_with_the_variables():
    done = seen("import runpy; runpy.run_module('modelwright.core.print_environment', run_name='__main__')",
                **{SWITCH: "avx2"})  # fmt: skip
    words = dict(word.split("=") for word in done.stdout.split())
    folder = words.pop(COMPILED)
    assert folder.endswith("_avx2")
    assert words == {**LOWER["avx2"].variables, "GOMP_SPINCOUNT": SPIN_COUNT}
    assert seen("import torch, modelwright", **{SWITCH: "avx2", **words}).returncode == 0
    assert "ConfigError" in seen("import torch, modelwright", **{SWITCH: "avx2"}).stderr
