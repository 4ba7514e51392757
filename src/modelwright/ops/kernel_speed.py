"""Speed of this package's kernels for CPUs against the PyTorch operators that they replace, by instruction set.

The times are those of `kernels/speed.json`, which `benchmarks/kernels.py --write` measures and which is part of the
source: a measurement at first use could fall into a busy moment, and hosts of one run could decide differently.
"""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

Kernel = Literal["attention", "norm", "rotary", "gated_activation", "int8", "decode", "decode_step", "four_bits"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""Names of the kernels. `decode`: rotary embedding and gated activation for few tokens. It is measured and decides
nothing: PyTorch is faster there on AVX2, but its SiLU rounds the end of a tensor differently, so that the other
sequences of a batch would change the numbers of one. `decode_step`: a step of the engine as one operator; `four_bits`:
linear layers over 4-bit weights."""
SPEED = Path(__file__).with_name("kernels") / "speed.json"
TOLERANCE = 0.05
"""Part of a time by which measurements of equal speed differ; a kernel is used if it is slower nowhere by more."""
UNMEASURED: Mapping[str, frozenset[Kernel]] = {
    "avx512": frozenset({"attention", "norm", "rotary", "gated_activation", "int8"})
}
"""Kernels that are used without measured rows. On AVX-512 these together made whole training steps faster (docs/log.md:
in FP32 from 6.3 to 5.5 s, in BF16 from 3.2 to 1.7 s, in INT8 from 4.4 to 1.55 s); elsewhere they were not measured."""


@functools.cache
def speed() -> Mapping[str, Any]:
    """Measurements by instruction set: `processor`, `torch`, and `rows`, each with `kernel`, `case`, and the times
    `own_us` and `pytorch_us` of one thread.
    """
    return json.loads(SPEED.read_text(encoding="utf-8"))


def kernels_for(instruction_set: str) -> frozenset[Kernel]:
    """The kernels to use on an instruction set."""
    rows = rows_of(instruction_set)
    unmeasured = UNMEASURED.get(instruction_set, frozenset()) - {row["kernel"] for row in rows}
    return faster_kernels(rows) | unmeasured


def faster_kernels(rows: Sequence[Mapping[str, Any]]) -> frozenset[Kernel]:
    """The kernels to use by the rows of an instruction set; none without rows."""
    faster: set[Kernel] = set()
    for kernel in KERNELS:
        times = [(row["own_us"], row["pytorch_us"]) for row in rows if row["kernel"] == kernel]
        # Slower in no case, and faster in all of them together; without rows 0 is not below 0.
        none_slower = all(own <= (1.0 + TOLERANCE) * pytorch for own, pytorch in times)
        if none_slower and sum(own for own, _ in times) < sum(pytorch for _, pytorch in times):
            faster.add(kernel)
    return frozenset(faster)


def rows_of(instruction_set: str) -> Sequence[Mapping[str, Any]]:
    """The measured cases; none if the instruction set has not been measured."""
    return speed()[instruction_set]["rows"] if instruction_set in speed() else ()


def speed_lines(rows: Sequence[Mapping[str, Any]], used: Collection[Kernel]) -> list[str]:
    """The rows as text. used: the kernels that do the work of PyTorch's operators."""
    lines = [f"{'':<18}{'':<44}{'own':>9}{'PyTorch':>9}{'ratio':>7}  used"]
    for row in rows:
        own, other = row["own_us"], row["pytorch_us"]
        answer = "-" if row["kernel"] == "decode" else "yes" if row["kernel"] in used else "no"
        lines.append(f"{row['kernel']:<18}{row['case']:<44}{own:>9.1f}{other:>9.1f}{own / other:>7.2f}  {answer}")
    return lines
