"""`doctor`: a survey of the machine, with rates of matrix products at a model's own shapes.

The rates decide the fastest compute format on this machine, and the denominator of model FLOPs utilization. Changes
nothing on the machine. Attention's own products are not among the shapes: they are a few percent of the FLOPs at the
contexts trained here.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.core.config import ConfigError
from modelwright.core.resources import LoadMeter, OtherProcesses, hardware, load, num_usable_cores
from modelwright.model.decoder import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import rows_of, speed_lines
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.microbenchmark import Undisturbed, in_turn, int8_linear_rate, matmul_rate, undisturbed
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.blocks import plural

Pass = Literal["forward", "grad_input", "grad_weight"]
Rate = Callable[[int, int, int], float]
"""`(m, k, n) -> FLOP/s` of a product [m, k] x [k, n]."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`count` products [m, k] x [k, n]; `name`: layer; `during`: part of the step."""

    name: str
    during: Pass
    m: int
    k: int
    n: int
    count: float

    @property
    def flops(self) -> float:
        """FLOPs; a multiply-add counts as two."""
        return 2.0 * self.m * self.k * self.n * self.count

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n


def forward_products(model: ModelConfig, *, num_tokens: int, head_chunk_tokens: int) -> list[Product]:
    """Returns the linears of a forward pass over `num_tokens` tokens; the head works in chunks (ops.cross_entropy)."""
    query_dim, kv_dim = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layers = {
        "q_proj": (model.model_dim, query_dim),
        "k_proj": (model.model_dim, kv_dim),
        "v_proj": (model.model_dim, kv_dim),
        **({"output_gate": (model.model_dim, model.gate_dim)} if model.gate_dim else {}),
        **({"head_router": (model.model_dim, model.router_dim)} if model.router_dim else {}),
        "o_proj": (query_dim, model.model_dim),
        "gate_proj": (model.model_dim, model.ffn_dim),
        "up_proj": (model.model_dim, model.ffn_dim),
        "down_proj": (model.ffn_dim, model.model_dim),
    }
    products = [
        Product(name=name, during="forward", m=num_tokens, k=k, n=n, count=model.num_layers)
        for name, (k, n) in layers.items()
    ]
    chunk = min(num_tokens, head_chunk_tokens)
    head = Product(
        name="head", during="forward", m=chunk, k=model.model_dim, n=model.vocab_size, count=num_tokens / chunk
    )
    return [*products, head]


def training_products(model: ModelConfig, *, num_tokens: int, head_chunk_tokens: int) -> list[Product]:
    """Returns the forward products and, for each, its two backward products: gradients of input and of weight."""
    products = []
    for p in forward_products(model, num_tokens=num_tokens, head_chunk_tokens=head_chunk_tokens):
        products.append(p)
        products.append(Product(name=p.name, during="grad_input", m=p.m, k=p.n, n=p.k, count=p.count))
        products.append(Product(name=p.name, during="grad_weight", m=p.n, k=p.m, n=p.k, count=p.count))
    return products


def effective_rate(products: Iterable[Product], rate: Rate) -> float:
    """Returns FLOP/s of all products in sequence: total FLOPs over total time; each shape is looked up once."""
    known: dict[tuple[int, int, int], float] = {}
    flops = seconds = 0.0
    for product in products:
        if product.shape not in known:
            known[product.shape] = rate(*product.shape)
        flops += product.flops
        seconds += product.flops / known[product.shape]
    return flops / seconds


COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INT8_BACKENDS = ("fbgemm", "int_mm")
INT8_TOKENS = {"decode": 8, "prefill": 256}
"""Rows of the products on which INT8 is measured: a few streams decoding, a prompt."""
_PROBE_TOKENS = 64
NUM_ROUNDS = 2
_REPEATS = 2
"""Measurements of each product in a round."""


@dataclass(frozen=True, kw_only=True)
class _Formats:
    """products: products of a step, as each format was measured; best: FLOP/s by format and shape."""

    products: Mapping[str, list[Product]]
    best: Mapping[Any, float]


def survey(
    model: ModelConfig, *, num_tokens: int, folder: Path, device: str = "cpu", budget_s: float = 6.0
) -> dict[str, Any]:
    """Returns all facts of `doctor` as plain data: `machine`, `torch`, `training`, `int8`, `kernels` (this package's
    kernels for CPUs, with the table of their measurements), `recommended`.

    `num_tokens`: tokens of one microbatch on one rank; `folder`: folder of runs; `budget_s`: approximate time to
    measure each format.
    """
    training = measure_rates(model, num_tokens=num_tokens, device=device, budget_s=budget_s)
    int8 = measure_int8(model, budget_s=budget_s) if device == "cpu" else {}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    instruction_set = cpu_kernels.instruction_set()
    return {
        "machine": machine(folder),
        "torch": {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        },
        "training": training,
        "int8": int8,
        "kernels": {
            "instruction_set": instruction_set,
            "used": sorted(cpu_kernels.used()),
            "rows": list(rows_of(instruction_set)),
        },
        "recommended": recommend(training, int8),
    }


def machine(folder: Path) -> dict[str, Any]:
    """Returns processor, cores, memory (whole, available, and the limit of the control group), free disk under
    `folder`.
    """
    existing = next((f for f in (folder, *folder.resolve().parents) if f.is_dir()), Path("/"))
    limit = 0
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(path).read_text())
            break
    return {
        **hardware(),
        "memory_available_bytes": available_memory(),
        "memory_limit_bytes": limit if limit < 1 << 60 else 0,  # cgroup v1 writes a huge number for "no limit"
        "disk_free_bytes": shutil.disk_usage(existing).free,
        "load": load(),
    }


def measure_rates(
    model: ModelConfig,
    *,
    num_tokens: int,
    device: str = "cpu",
    budget_s: float = 6.0,
    head_chunk_tokens: int = CHUNK_TOKENS,
    rate: Callable[..., float] | None = None,
    others: LoadMeter | None = None,
) -> dict[str, Any]:
    """Measures rates of the model's products in a training step, forward and both backward products of every linear.

    Returns `{"threads", "products": [{name, during, m, k, n, flops, "fp32": FLOP/s, "bf16": FLOP/s}],
    "effective": {"fp32": FLOP/s, "bf16": FLOP/s}, "tokens": {"fp32": n, ...}, "busy_cores", "measured_threads"}`.
    `effective` weighs the products by their time; `precision.policy.resolve` and the loop's `peak_flops` use it.
    `tokens`: tokens with which each format was measured, fewer for one that is too slow for the budget.
    busy_cores: see `Undisturbed`; measured_threads: one on a busy machine, and rates are its rate times `threads`.
    `rate`, `(m, k, n, dtype) -> FLOP/s`, and `others` replace the measurements in tests.
    """
    measure = rate or partial(_float_rate, device=device)
    whole = training_products(model, num_tokens=num_tokens, head_chunk_tokens=head_chunk_tokens)
    threads = torch.get_num_threads()

    largest = max(whole, key=lambda p: p.k * p.n)
    step_flops = sum({p.shape: 2.0 * p.m * p.k * p.n for p in whole}.values())  # of unique shapes

    def measure_formats() -> _Formats:
        products = {}
        for name, dtype in COMPUTE_DTYPES.items():
            # The most tokens, a power of two if below `num_tokens`, with which every shape can be measured in time.
            probed = measure(min(_PROBE_TOKENS, num_tokens), largest.k, largest.n, dtype=dtype)
            tokens, seconds = num_tokens, NUM_ROUNDS * (_REPEATS + 2) * step_flops / probed
            if seconds > budget_s:
                share = num_tokens * budget_s / seconds
                tokens = max(_PROBE_TOKENS, 2 ** math.floor(math.log2(max(1.0, share))))
            products[name] = training_products(model, num_tokens=tokens, head_chunk_tokens=head_chunk_tokens)
        # The formats alternate at every product, so that a change of the clock affects both alike.
        measures = {
            (name, product.shape): partial(measure, *product.shape, dtype=COMPUTE_DTYPES[name])
            for same_product in zip(*products.values(), strict=True)
            for name, product in zip(products, same_product, strict=True)
        }
        return _Formats(products=products, best=_best_of_rounds(measures))

    if device == "cpu":
        result = undisturbed(measure_formats, others or OtherProcesses())
    else:
        result = Undisturbed(value=measure_formats(), num_threads=threads, busy_cores=0.0)
    rows = [{"name": p.name, "during": p.during, "m": p.m, "k": p.k, "n": p.n, "flops": p.flops} for p in whole]
    effective = {}
    for name, products in result.value.products.items():
        rate_of = partial(_known_rate, result.value.best, name, threads / result.num_threads)
        effective[name] = effective_rate(products, rate_of)
        for row, product in zip(rows, products, strict=True):
            row[name] = rate_of(*product.shape)
    return {
        "threads": threads,
        "products": rows,
        "effective": effective,
        "tokens": {name: products[0].m for name, products in result.value.products.items()},
        "busy_cores": result.busy_cores,
        "measured_threads": result.num_threads,
    }


def busy_note(busy_cores: float, *, remedy: str) -> str:
    """Returns a note about rates that were measured on a busy machine, "" if it was quiet."""
    if not busy_cores:
        return ""
    return (
        f"other processes use {busy_cores:.1f} of {num_usable_cores()} cores: the measured rates, and what follows "
        f"from them, may be wrong; {remedy}"
    )


def measure_int8(model: ModelConfig, *, budget_s: float = 6.0) -> dict[str, Any]:
    """Measures dynamic INT8 against FP32 at the model's linears (the head aside), by backend and number of rows.

    Returns `{"decode" | "prefill": {"fp32": FLOP/s, "fbgemm": FLOP/s, "int_mm": FLOP/s}}`; a backend that this build or
    processor lacks is left out.
    """
    table: dict[str, Any] = {}
    for name, num_tokens in INT8_TOKENS.items():
        products = [
            p for p in forward_products(model, num_tokens=num_tokens, head_chunk_tokens=num_tokens) if p.name != "head"
        ]
        kinds: dict[str, Rate] = {"fp32": partial(_float_rate, dtype=torch.float32, device="cpu")}
        for backend in INT8_BACKENDS:
            # Only a trial shows whether this build and processor have the backend.
            try:
                int8_linear_rate(*products[0].shape, backend=backend, repeats=1)
            except (ConfigError, RuntimeError, AttributeError):
                continue
            kinds[backend] = partial(int8_linear_rate, backend=backend, repeats=_REPEATS)
        measures = {
            (kind, product.shape): partial(rate, *product.shape) for product in products for kind, rate in kinds.items()
        }
        result = undisturbed(partial(_best_of_rounds, measures), OtherProcesses())
        times = torch.get_num_threads() / result.num_threads
        table[name] = {
            kind: effective_rate(products, partial(_known_rate, result.value, kind, times)) for kind in kinds
        }
    return table


def recommend(training: dict[str, Any], int8: dict[str, Any]) -> dict[str, Any]:
    """Returns the fastest training format, the fastest INT8 backend for decoding ("none" if FP32 is faster), and the
    threads, with reasons.
    """
    effective = training["effective"]
    compute = max(effective, key=effective.__getitem__)
    others = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in effective.items() if name != compute)
    advice = {
        "compute": compute,
        "compute_reason": f"{effective[compute] / 1e9:.0f} GFLOP/s at the model's own shapes, against {others}",
        "threads": num_usable_cores(),
    }
    if int8:
        rates = int8["decode"]
        best = max(rates, key=rates.__getitem__)
        advice["int8_backend"] = "none" if best == "fp32" else best
        advice["int8_reason"] = f"{rates[best] / rates['fp32']:.1f}x FP32 at {INT8_TOKENS['decode']} rows"
    return advice


def survey_text(facts: dict[str, Any]) -> str:
    """Returns the survey as a plain-text table."""
    box, library, training, kernels = facts["machine"], facts["torch"], facts["training"], facts["kernels"]
    limit = f", limited to {size(box['memory_limit_bytes'])}" if box["memory_limit_bytes"] else ""
    gpus = ", ".join(f"{gpu['name']} ({size(gpu['memory_bytes'])})" for gpu in library["gpus"]) or "none"
    lines = [
        f"processor   {box['processor']}, {plural(box['cores'], 'usable core')}, load {box['load']:.1f}",
        f"memory      {size(box['memory_bytes'])}, {size(box['memory_available_bytes'])} available{limit}",
        f"disk        {size(box['disk_free_bytes'])} free",
        f"torch       {library['version']}, {plural(library['threads'], 'thread')}, {library['cpu_capability']}",
        f"GPU         {gpus}",
        "",
        f"GFLOP/s of the model's products in training ({plural(training['threads'], 'thread')}; "
        + ", ".join(f"{name} at {tokens} tokens" for name, tokens in training["tokens"].items())
        + ")",
    ]
    formats, total = list(training["effective"]), sum(row["flops"] for row in training["products"])
    lines.append(f"{'':<24}{'m x k x n':>22}{'share':>8}" + "".join(f"{name:>8}" for name in formats))
    for row in training["products"]:
        shape = f"{row['m']} x {row['k']} x {row['n']}"
        cells = "".join(f"{row[name] / 1e9:>8.1f}" for name in formats)
        lines.append(f"{row['name'] + ' ' + row['during']:<24}{shape:>22}{row['flops'] / total:>8.1%}{cells}")
    cells = "".join(f"{training['effective'][name] / 1e9:>8.1f}" for name in formats)
    lines.append(f"{'effective':<24}{'':>22}{'100.0%':>8}{cells}")
    if busy := busy_note(training["busy_cores"], remedy="run this again when the machine is quiet"):
        lines.append(f"note: {busy}")
    if facts["int8"]:
        names = list(dict.fromkeys(name for rates in facts["int8"].values() for name in rates))
        lines += ["", "GFLOP/s of the blocks' linears in serving"]
        lines.append(f"{'':<16}{'rows':>6}" + "".join(f"{name:>9}" for name in names))
        for use, rates in facts["int8"].items():
            cells = "".join(f"{rates[name] / 1e9:>9.1f}" if name in rates else f"{'-':>9}" for name in names)
            lines.append(f"{use:<16}{INT8_TOKENS[use]:>6}{cells}")
    lines.append("")
    if not kernels["instruction_set"]:
        lines.append("own kernels: none; PyTorch's operators do their work")
    elif not kernels["rows"]:
        used = ", ".join(kernels["used"]) or "none"
        measure = "not measured (benchmarks/kernel_speed.py --write)"
        lines.append(f"own kernels on {kernels['instruction_set']}: {used}, {measure}")
    else:
        title = f"own kernels on {kernels['instruction_set']} against PyTorch's operators, microseconds of one thread"
        lines += [f"{title} (from the table of this version)", *speed_lines(kernels["rows"], kernels["used"])]
        if unmeasured := ", ".join(sorted({*kernels["used"]} - {row["kernel"] for row in kernels["rows"]})):
            lines.append(f"used without a measurement: {unmeasured}")
    advice = facts["recommended"]
    lines += ["", f"recommended compute: {advice['compute']} ({advice['compute_reason']})"]
    if "int8_backend" in advice:
        lines.append(f"recommended INT8 backend: {advice['int8_backend']} ({advice['int8_reason']})")
    return "\n".join(lines)


def _float_rate(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> float:
    return matmul_rate(m, k, n, dtype=dtype, device=device, repeats=_REPEATS)


def _best_of_rounds(measures: Mapping[Any, Callable[[], float]]) -> dict[Any, float]:
    # The highest rate of each measure: a busy moment in one round does not lower it.
    return {key: max(rates) for key, rates in in_turn(measures, num_rounds=NUM_ROUNDS).items()}


def _known_rate(best: Mapping[Any, float], kind: str, times: float, m: int, k: int, n: int) -> float:
    return times * best[kind, (m, k, n)]


def available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
