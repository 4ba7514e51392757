"""What closed heads save: attention of selected heads (`model/head_selection.py`) beside attention of all heads.

    python benchmarks/selected_heads.py [--rounds 25]

One thread and its own time; all cases alternate in every round; the minimum counts. Training: attention alone, forward
and with its backward, for heads that are opened at random for each token. Decoding: steps of the engine, of streams
with the same context; the time of attention is what a step takes longer than one with all heads closed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from modelwright.core.resources import hardware
from modelwright.infer.decode_operator import decode_operator
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.model_runner import ModelRunner
from modelwright.infer.products import stable_row_multiple
from modelwright.infer.scheduler import SchedulerOutput
from modelwright.infer.sequence import SamplingParams, Sequence
from modelwright.model.adapter_bank import AdapterSet
from modelwright.model.decoder import Block, Decoder, Linear
from modelwright.ops import cpu_kernels
from modelwright.ops.attention import packed_attention, packed_tiles
from modelwright.ops.microbenchmark import in_turn
from modelwright.ops.selected_attention import selected_attention
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.recipes.load import recipe

ROWS, ROW_LEN, HEADS, KV_HEADS, HEAD_DIM = 2, 1024, 8, 4, 64
DOCUMENT_LENS = (1024, 256, 64)
SHARES = (0.75, 0.65, 0.5, 0.25)
CONTEXT, STREAMS, BLOCK_LEN, CPU = 1024, 8, 16, torch.device("cpu")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL = "all heads"
SHORTEST_S = 2e-3
"""A measurement repeats its call for about as long."""


@dataclass(frozen=True)
class Group:
    """Cases that are compared with each other: calls by the heads that they compute. floor: the case whose time is no
    attention, "" without.
    """

    name: str
    calls: Mapping[str, Callable[[], object]]
    floor: str = ""


def training_groups() -> Iterator[Group]:
    for name, dtype in FORMATS.items():
        for length in DOCUMENT_LENS:
            segments_BT = (torch.arange(ROW_LEN) // length).expand(ROWS, ROW_LEN).contiguous()
            tiles = packed_tiles(segments_BT)
            q, k, v = (
                torch.randn(ROWS, ROW_LEN, heads, HEAD_DIM).to(dtype).requires_grad_()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            functions = {ALL: partial(packed_attention, q, k, v, tiles)}
            for share in SHARES:
                open_BTK = torch.rand(ROWS, ROW_LEN, KV_HEADS) < share
                open_BTH = open_BTK.repeat_interleave(HEADS // KV_HEADS, dim=-1)
                functions[f"{share:.0%} open"] = partial(selected_attention, q, k, v, open_BTH, tiles)
            shown = f"documents of {length}, {name}"
            yield Group(f"{shown}, forward", {key: unwatched(one) for key, one in functions.items()})
            yield Group(f"{shown}, trained", {key: trained(one, (q, k, v)) for key, one in functions.items()})


def unwatched(function: Callable[[], Tensor]) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> None:
        function()

    return call


def trained(function: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function().sum(), leaves)


def decoding_groups() -> Iterator[Group]:
    for name, dtype in FORMATS.items():
        for group in (1, 2):
            steps = {ALL: step_of(1.0, dtype, group)}
            steps |= {f"{share:.0%} open": step_of(share, dtype, group) for share in SHARES}
            steps["none"] = step_of(0.0, dtype, group)
            yield Group(f"decoding, {STREAMS} streams, {group} to a key/value head, {name}", steps, "none")


def step_of(share: float, dtype: torch.dtype, group: int) -> Callable[[], object]:
    """A step of the quickstart's model, whose routers open a fixed share of all key/value heads, drawn at random.

    group: query heads of a key/value head.
    """
    shape = recipe("quickstart").model
    shape = replace(shape, max_seq_len=CONTEXT + 1, head_budget=0.5, num_kv_heads=shape.num_heads // group)
    model = Decoder(shape)
    model.init_weights(0)
    ranks = torch.rand(shape.num_layers, shape.num_kv_heads).flatten().argsort().argsort().view(shape.num_layers, -1)
    for layer, block in model.blocks.items():
        assert isinstance(block, Block)
        router = Linear(shape.model_dim, shape.num_kv_heads, bias=True)
        with torch.no_grad():
            router.weight.zero_()
            router.bias.copy_(torch.where(ranks[int(layer)] < round(share * ranks.numel()), 1.0, -1.0))
        block.attention.head_router = router
    model = model.to(dtype).eval()
    own_blocks = CONTEXT // BLOCK_LEN + 1
    cache = PagedCache(model.config, STREAMS * own_blocks, BLOCK_LEN, dtype=dtype, device=CPU)
    operator, reason = decode_operator(model, cache)
    assert operator is not None, reason
    multiple = stable_row_multiple(model, model.logits)
    runner = ModelRunner(model, model.logits, cache, AdapterSet(model), row_multiple=multiple, operator=operator)

    def call() -> None:
        decodes = [
            Sequence(str(one), [one + 1] * (CONTEXT + 1), 1, SamplingParams(), num_cached=CONTEXT,
                     block_table=[1 + one * own_blocks + number for number in range(own_blocks)])
            for one in range(STREAMS)
        ]  # fmt: skip
        runner.run(SchedulerOutput(decodes))

    return call


def measured(groups: list[Group], num_rounds: int) -> dict[tuple[str, str], float]:
    """Seconds of a call, by group and case."""

    def seconds(call: Callable[[], object], calls: int = 1) -> float:
        start = time.thread_time()
        for _ in range(calls):
            call()
        return (time.thread_time() - start) / calls

    timers = {}
    for group in groups:
        for case, call in group.calls.items():
            calls = max(1, round(SHORTEST_S / min(seconds(call) for _ in range(2))))
            timers[group.name, case] = partial(seconds, call, calls)
    use_tensor_heap()
    times = in_turn(timers, num_rounds=num_rounds)
    return {key: min(of) for key, of in times.items()}


def lines(groups: list[Group], times: Mapping[tuple[str, str], float]) -> Iterator[str]:
    yield f"{'':<48}{'heads':<12}{'us':>10}{'attention':>12}"
    for group in groups:
        floor = times[group.name, group.floor] if group.floor else 0.0
        whole = times[group.name, ALL] - floor
        for case in group.calls:
            share = (times[group.name, case] - floor) / whole
            yield f"{group.name:<48}{case:<12}{1e6 * times[group.name, case]:>10.1f}{share:>12.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="of which the fastest counts")
    parser.add_argument("--only", choices=("training", "decoding"), help="one of the two tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    missing = {"attention", "decode_step"} - cpu_kernels.used()
    if missing:
        sys.exit(f"the kernels {', '.join(sorted(missing))} are not used here, so there is nothing to measure")
    tables = {"training": training_groups, "decoding": decoding_groups}
    groups = [group for name, table in tables.items() if options.only in (None, name) for group in table()]
    print(f"{cpu_kernels.instruction_set()}, {hardware()['processor']}, torch {torch.__version__}: one thread")
    print("\n".join(lines(groups, measured(groups, options.rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
