"""Each of this package's kernels for CPUs beside the PyTorch operators that it replaces, on this processor.

    python benchmarks/kernel_speed.py [--rounds 25] [--only decode_step] [--write]
    export MODELWRIGHT_ISA=avx2    # as on a processor with AVX2 alone
    env $(python -m modelwright.core.print_environment) python benchmarks/kernel_speed.py

One thread and its own time, so that other processes disturb little; all cases and both sides alternate in every round;
the minimum counts. A case is a call, with its backward where it trains. Prints the table of this instruction set;
--write puts it into src/modelwright/ops/kernels/speed.json, by which Modelwright chooses (`ops/cpu_kernels.py`); with
--only it replaces the rows of those kernels.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelwright.compress.int8 import (
    ActivationGrid,
    GridLinear,
    InputGrid,
    Int8WeightsConfig,
    TrainedGrid,
    quantize_model,
    quantize_to_grid,
)
from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import hardware
from modelwright.infer.decode_operator import decode_operator
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.model_runner import ModelRunner
from modelwright.infer.products import stable_row_multiple
from modelwright.infer.scheduler import SchedulerOutput
from modelwright.infer.sequence import SamplingParams, Sequence
from modelwright.model.adapter_bank import AdapterSet
from modelwright.model.decoder import Decoder
from modelwright.ops import cpu_kernels
from modelwright.ops.attention import packed_attention, packed_cuts
from modelwright.ops.cpu_kernels import KERNELS, SPEED, Kernel, faster_kernels, rows_of, speed, speed_lines
from modelwright.ops.int_grid import WeightGrid
from modelwright.ops.microbenchmark import in_turn
from modelwright.ops.quantize import ROWWISE, quantize
from modelwright.ops.rope_norm_swiglu import apply_rope, rms_norm, rope_tables, swiglu
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.recipes.load import recipe

ROWS, ROW_LEN, HEADS, KV_HEADS, HEAD_DIM = 2, 512, 4, 2, 64
WIDTH, FFN_WIDTH = 256, 704
FOUR_BITS = WeightGrid(bits=4, granularity="group_32")
ACTIVATIONS: dict[ActivationGrid, str] = {"none": "fp32 activations", "token": "int8 activations"}
CONTEXT, BLOCK_LEN, CPU = 128, 16, torch.device("cpu")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = {"own_us": ",".join(KERNELS), "pytorch_us": "0"}
"""Values of the switch."""
SHORTEST_S = 2e-3
"""A measurement repeats its call for about as long."""


@dataclass(frozen=True)
class Case:
    kernel: Kernel
    name: str
    call: Callable[[], object]


def trained(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward."""
    leaves = [one.requires_grad_() for one in inputs]
    return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)


def unwatched(function: Callable[..., object], *inputs: Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> None:
        function(*inputs)

    return call


def attention_of(document_len: int, dtype: torch.dtype) -> Callable[[], object]:
    segments_BT = (torch.arange(ROW_LEN) // document_len).expand(ROWS, ROW_LEN).contiguous()
    shapes = [(ROWS, ROW_LEN, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    tiles = {}  # each side cuts as it computes

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        side = os.environ[cpu_kernels.SWITCH]
        if side not in tiles:
            tiles[side] = packed_cuts(segments_BT)
        return packed_attention(q, k, v, tiles[side])

    return trained(attend, q, k, v)


def cases() -> Iterator[Case]:
    positions_BT = torch.arange(ROW_LEN).expand(ROWS, ROW_LEN)
    tables = rope_tables(positions_BT, HEAD_DIM, 1e4)
    for name, dtype in FORMATS.items():
        for length in (ROW_LEN, 128, 32):
            yield Case("attention", f"documents of {length}, {name}, trained", attention_of(length, dtype))
        for shape in ((ROWS, ROW_LEN, WIDTH), (ROWS, ROW_LEN, HEADS, HEAD_DIM)):
            x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
            call = trained(lambda x, weight, dtype=dtype: rms_norm(x, weight, 1e-5, out_dtype=dtype), x, weight)
            yield Case("norm", f"width {shape[-1]}, {name}, trained", call)
        x = torch.randn(ROWS, ROW_LEN, HEADS, HEAD_DIM).to(dtype)
        yield Case("rotary", f"{HEADS} heads, {name}, trained", trained(lambda x: apply_rope(x, *tables), x))
        gate, up = (torch.randn(ROWS, ROW_LEN, FFN_WIDTH).to(dtype) for _ in range(2))
        yield Case("gated_activation", f"width {FFN_WIDTH}, {name}, trained", trained(swiglu, gate, up))
        x = torch.randn(ROWS * ROW_LEN, WIDTH).to(dtype)
        for across in (False, True):
            for stochastic in (False, True):
                shown = f"codes by {'column' if across else 'row'}, {name}, {'random' if stochastic else 'nearest'}"
                yield Case("int8", shown, lambda x=x.T if across else x, s=stochastic: codes(x, stochastic=s))
        for tokens in (1, 8):
            yield Case("int8", f"codes of {tokens} rows, {name}, nearest", unwatched(codes, x[:tokens]))
            few = rope_tables(torch.arange(tokens)[:, None], HEAD_DIM, 1e4)
            heads = torch.randn(tokens, 1, HEADS, HEAD_DIM).to(dtype)
            yield Case("decode", f"rotary of {tokens} tokens, {name}", unwatched(apply_rope, heads, *few))
            gate, up = (torch.randn(tokens, 1, FFN_WIDTH).to(dtype) for _ in range(2))
            yield Case("decode", f"gated activation of {tokens} tokens, {name}", unwatched(swiglu, gate, up))


def four_bit_cases() -> Iterator[Case]:
    """Products of feed-forward layers of width 256 with 4-bit weights; PyTorch's operators widen them in each call."""
    weight = torch.randn(FFN_WIDTH, WIDTH)
    for activations, shown in ACTIVATIONS.items():
        codes = FOUR_BITS.codes(weight, *FOUR_BITS.ranges(weight))
        linear = GridLinear(codes, FOUR_BITS, InputGrid(kind=activations))
        for rows in (1, 8, 256):
            yield Case("four_bits", f"{rows} rows, {shown}", unwatched(linear, torch.randn(rows, WIDTH)))


def decoding_cases() -> Iterator[Case]:
    """Steps of the engine's runner, each over the same 128 tokens of its streams."""
    model = Decoder(recipe("quickstart").model)
    model.init_weights(0)
    models = {name: copy.deepcopy(model).to(dtype) for name, dtype in FORMATS.items()}
    models["int8"] = quantize_model(model, Int8WeightsConfig())
    for activations in ACTIVATIONS:
        grid = TrainedGrid(weights=FOUR_BITS, activations=activations, int8_ends=True)
        models[f"int4, {ACTIVATIONS[activations]}"] = quantize_to_grid(model, grid, choose=lambda matrices: "int_mm")
    for name, one in models.items():
        for streams in (1, 8, 32):
            yield Case("decode_step", f"{streams} streams, {name}", step_of(one.eval(), streams))


def step_of(model: Decoder, num_streams: int) -> Callable[[], object]:
    runners = {}  # an engine of each side
    own_blocks = CONTEXT // BLOCK_LEN + 1

    def call() -> None:
        side = os.environ[cpu_kernels.SWITCH]
        if side not in runners:
            cache = PagedCache(
                model.config, num_streams * own_blocks, BLOCK_LEN, dtype=model.norm.weight.dtype, device=CPU
            )
            multiple = stable_row_multiple(model, model.logits)
            operator, _ = decode_operator(model, cache)
            runners[side] = ModelRunner(
                model, model.logits, cache, AdapterSet(model), row_multiple=multiple, operator=operator
            )
        decodes = [
            Sequence(str(one), [one + 1] * (CONTEXT + 1), 1, SamplingParams(), num_cached=CONTEXT,
                     block_table=[1 + one * own_blocks + number for number in range(own_blocks)])
            for one in range(num_streams)
        ]  # fmt: skip
        runners[side].run(SchedulerOutput(decodes))

    return call


def codes(x_RK: Tensor, *, stochastic: bool = False) -> object:
    return quantize(x_RK, ROWWISE, torch.int8, stochastic=stochastic)


def measured(measures: List[Case], num_rounds: int) -> list[dict[str, Any]]:
    """The rows of the table: microseconds of a call on either side, the minimum of all rounds. A round goes through all
    cases, so that a busy moment falls into one round of each.
    """

    def seconds(case: Case, setting: str, calls: int = 1) -> float:
        os.environ[cpu_kernels.SWITCH] = setting
        start = time.thread_time()
        for _ in range(calls):
            case.call()
        return (time.thread_time() - start) / calls

    timers = {}
    for case in measures:
        for side, setting in SIDES.items():
            calls = max(1, round(SHORTEST_S / min(seconds(case, setting) for _ in range(2))))
            timers[case.name, side] = partial(seconds, case, setting, calls)
    use_tensor_heap()  # as training does; else the times are those of fresh pages
    times = in_turn(timers, num_rounds=num_rounds)
    return [
        {"kernel": case.kernel, "case": case.name}
        | {side: round(1e6 * min(times[case.name, side]), 1) for side in SIDES}
        for case in measures
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="of which the fastest counts")
    parser.add_argument("--write", action="store_true", help=f"write the rows into {SPEED.name}")
    parser.add_argument("--only", type=lambda names: names.split(","), default=KERNELS, metavar="KERNEL,...")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = cpu_kernels.instruction_set()
    if not name:
        sys.exit("there are no kernels here: install a C++ compiler")
    chosen = [case for case in (*cases(), *four_bit_cases(), *decoding_cases()) if case.kernel in options.only]
    rows = measured(chosen, options.rounds)
    rows += [row for row in rows_of(name) if row["kernel"] not in options.only]
    rows.sort(key=lambda row: KERNELS.index(row["kernel"]))
    entry = {"processor": hardware()["processor"], "torch": torch.__version__, "rows": rows}
    if options.write:
        write_atomic(SPEED, json.dumps(dict(sorted({**speed(), name: entry}.items())), indent=1) + "\n")
    print(f"{name}, {entry['processor']}, torch {entry['torch']}: microseconds of one thread")
    print("\n".join(speed_lines(rows, faster_kernels(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
