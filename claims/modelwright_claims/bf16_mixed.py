"""Claim: BF16 compute over FP32 master weights trains faster in less memory to the same loss."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.ops.rates import matmul_rate
from modelwright.precision.model import fp32_products
from modelwright.precision.policy import Policy, PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.large_runs import Paced, large_size, paces, peaks
from modelwright_claims.statistics import paired_t_test, spread
from modelwright_claims.training_run import Run

SPEED_TARGET = 2.0
LOSS_TARGET = 0.02
FORMATS: dict[str, Policy] = {"fp32": "fp32", "bf16": "bf16_mixed"}
BY_ONEDNN = "fp32 by oneDNN"
"""Exact FP32 products by the library that has BF16's: PyTorch takes MKL's, on some processors at half that rate."""

MEMORY_ROWS = 16
"""Rows of a batch where memory is compared."""


def measure(setting: Setting) -> Result:
    """Losses of paired seeds on a small model; pace and memory on one of 39 million parameters."""
    size = workbench.size(setting)
    size = replace(size, num_steps=size.num_steps // (3 if setting.quick else 1))
    formats = {name: PrecisionConfig(policy=policy) for name, policy in FORMATS.items()}
    short = 5 if setting.quick else 12
    paced = {name: Paced(precision=one, first=2, end=short) for name, one in formats.items()}
    if onednn_is_exact():
        paced[BY_ONEDNN] = replace(paced["fp32"], precision=replace(formats["fp32"], onednn=True))
    seeds = range(2 if setting.quick else 5)
    found = paces(setting, paced, seeds[:3])
    taken = peaks(setting, formats, batch_rows=MEMORY_ROWS)
    variants = {name: Run(size=size, settings={"precision": dump(one)}) for name, one in formats.items()}
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds))
    losses = {name: samples.losses(name) for name in variants}
    device, large = workbench.device(), large_size(setting)
    shape = (large.batch_tokens, large.model_dim, 8 * large.model_dim // 3)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    rates = {name: matmul_rate(*shape, dtype=dtypes[name], device=device, repeats=3) for name in FORMATS}
    return judge(found, losses, taken, rates, size, large)


def onednn_is_exact() -> bool:
    """Whether oneDNN's FP32 products are another way to the same values here."""
    if workbench.device().type != "cpu":
        return False
    try:
        with fp32_products(onednn=True):
            return True
    except ConfigError:
        return False


def judge(
    speeds: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int],
    rates: Mapping[str, float],
    size: workbench.Size,
    large: workbench.Size,
) -> Result:
    """Met when faster by `SPEED_TARGET`, no worse by more than `LOSS_TARGET` nats, and in less memory."""
    speed_ups = [b / f for b, f in zip(speeds["bf16"], speeds["fp32"], strict=True)]
    speed_up, gap = statistics.median(speed_ups), paired_t_test(losses["bf16"], losses["fp32"])
    memory, product = peaks["bf16"] / peaks["fp32"], rates["bf16"] / rates["fp32"]
    missed, over_onednn = _missed(speed_up, gap.mean, memory), {}
    reason = f"{speed_up:.2f}x the speed, {memory:.2f}x the memory, loss {gap.mean:+.4f} nats (p = {gap.p_value:.2g})"
    if BY_ONEDNN in speeds:
        fairest = [b / f for b, f in zip(speeds["bf16"], speeds[BY_ONEDNN], strict=True)]
        middle = statistics.median(fairest)
        reason += f"; {middle:.2f}x FP32 whose products are oneDNN's, as BF16's are, and not those PyTorch takes itself"
        over_onednn = {"speed-up over FP32 by oneDNN": Figure(value=middle, unit="x", spread=spread(fairest))}
    if missed:
        reason = f"{', '.join(missed)}: {reason}. " + _explain(product)
    return Result(
        kind="short" if missed else "met",
        reason=reason,
        figures={
            "speed-up": Figure(value=speed_up, unit="x", spread=spread(speed_ups)),
            **over_onednn,
            "loss gap": Figure(value=gap.mean, unit="nats", spread=gap.std),
            "memory ratio": Figure(value=memory, unit="x"),
            "matrix product speed-up": Figure(value=product, unit="x"),
            "tokens per second, FP32": Figure(value=statistics.median(speeds["fp32"]), unit="/s"),
            "tokens per second, BF16": Figure(value=statistics.median(speeds["bf16"]), unit="/s"),
            "peak memory above start, FP32": Figure(value=peaks["fp32"] / 2**20, unit="MiB"),
            "peak memory above start, BF16": Figure(value=peaks["bf16"] / 2**20, unit="MiB"),
        },
        conditions={
            **size.describe(),
            "pace": f"{large.model_config(workbench.VOCAB_SIZE).num_parameters} parameters, {large.batch_rows} rows of "
            f"{large.seq_len} tokens",
            "memory": f"the same model, {MEMORY_ROWS} rows; {memory_probe.CONDITION}",
        },
        samples={
            **{f"held-out loss, {name}": of for name, of in losses.items()},
            **{f"tokens per second, {name}": of for name, of in speeds.items()},
        },
    )


def _missed(speed_up: float, gap: float, memory: float) -> list[str]:
    missed = [f"speed short by {SPEED_TARGET - speed_up:.2f}x"] if speed_up < SPEED_TARGET else []
    missed += [f"loss worse by {gap:.3f} nats"] if gap > LOSS_TARGET else []
    return missed + (["no memory saved"] if memory >= 1 else [])


def _explain(product: float) -> str:
    """Why the speed fell short, from the ratio of the bare matrix products."""
    if product >= SPEED_TARGET:
        return (
            f"The bare BF16 product is {product:.1f}x FP32 here: the rest of the step, not the products, is the limit."
        )
    return (
        f"The bare BF16 product runs at {product:.2f}x FP32 on this machine "
        f"({torch.backends.cpu.get_cpu_capability()}; no BF16 instructions are in use), so no training step can gain. "
        "`policy: fastest` measures this and chooses FP32."
        if product < 1
        else f"The bare BF16 product is only {product:.2f}x FP32 on this machine."
    )


CLAIM = Claim(
    name="bf16_mixed",
    statement="Training with BF16 compute and FP32 master weights is faster than FP32, takes less memory and reaches "
    "the same loss.",
    source="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322); PyTorch and "
    "Intel, Empowering PyTorch on Intel Xeon Scalable processors with Bfloat16, 2022",
    published="the loss of FP32 with the same settings (2019); 1.4-1.6x FP32 in training on Cooper Lake CPUs (2022)",
    compared="the same run with the policies bf16_mixed and fp32, alternated; same initial weights and data order per "
    "seed; losses on a small model, pace and memory on one of more than 30 million parameters, memory in processes of "
    "their own; the bare matrix product beside it",
    target=f"at least {SPEED_TARGET}x the tokens per second, at most {LOSS_TARGET} nats more held-out loss, less "
    "memory",
    measure=measure,
)
