"""Claim: ZeRO divides a model's states by the number of ranks; and the planner's memory model, checked on the way."""

from collections.abc import Mapping, Sequence

from modelwright.core.config import ConfigError
from modelwright.model.decoder import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.parallel.mesh import ParallelConfig, ZeroStage
from modelwright.pipeline.estimate.cost import RankPart, rank_memory
from modelwright.pipeline.estimate.layout import TrainingJob
from modelwright.train.memory.activations import Segment, block_shape
from modelwright_claims import memory_probe
from modelwright_claims.activation_checkpointing import MEMORY_ERRORS
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.memory_probe import Measured, Probe
from modelwright_claims.statistics import estimate
from modelwright_plan.catalog import DEVICES, MODELS
from modelwright_plan.layout_search import Cluster, propose

TARGET = 10.0
REPEATS = 2
STATES, PEAK, PLANNED = "bytes of states, ", "peak bytes, ", "planned for 175B: "
LARGE = "gpt3-175b"
_FP32, _STATES = 4, 12
Case = tuple[ZeroStage, int, int]
"""ZeRO stage, ranks, and how many of these share each matrix (tensor parallelism)."""
SHARDED = ("none", "optimizer", "gradients", "full")
"""What each ZeRO stage divides, in the names of samples."""
ALONE, BOTH_WAYS = "none, 1 ranks", "full and tensor 2, 8 ranks"
SPLIT_SHARE = "states on a rank, 8 ranks split both ways, to one rank"


def measure(setting: Setting) -> Measurement:
    """States between steps and the peak of a step, on the first rank: of 2 for each ZeRO stage, of 4 and 8 at stage 3
    with and without matrices that two ranks share.
    """
    width, num_layers, vocab = (512, 4, 2048) if setting.quick else (768, 8, 4096)
    model = memory_probe.probe_model(model_dim=width, num_layers=num_layers, vocab_size=vocab, seq_len=128, head_dim=64)
    cases: list[Case] = [(0, 1, 1), (0, 2, 1), (3, 2, 1)]
    if not setting.quick:
        cases += [(1, 2, 1), (2, 2, 1), (3, 4, 1), (3, 4, 2), (3, 8, 1), (3, 8, 2)]
    result: dict[Case, Sequence[Measured]] = {}
    for case in cases:
        setting.progress.note(f"zero_memory: {case_name(*case)}")
        result[case] = [memory_probe.measure(probe(model, *case), num_ranks=case[1])[0] for _ in range(REPEATS)]
    estimates = {case: estimated_bytes(model, *case) for case in result}
    return measurement(result, estimates, model, large=large_model(quick=setting.quick))


def case_name(zero_stage: ZeroStage, num_ranks: int, tensor: int) -> str:
    return f"{SHARDED[zero_stage]}{f' and tensor {tensor}' if tensor > 1 else ''}, {num_ranks} ranks"


def probe(model: ModelConfig, zero_stage: ZeroStage, num_ranks: int, tensor: int = 1) -> Probe:
    """A single row for each rank that holds other rows."""
    parallel = ParallelConfig(zero_stage=zero_stage, tensor=tensor, shared_memory=False)
    return memory_probe.fp32_probe(model, rows=num_ranks // tensor, parallel=parallel)


def theory_bytes(num_parameters: int, sharded: str, num_ranks: int) -> float:
    """Weights and two optimizer states in FP32 between steps; FSDP2 divides both at every stage."""
    return _STATES * num_parameters / (1 if sharded == "none" else num_ranks)


def estimated_bytes(model: ModelConfig, zero_stage: ZeroStage, num_ranks: int, tensor: int = 1) -> int:
    """Return the planner's estimate of the peak."""
    fused = cpu_kernels.are_used_on("cpu")
    part = RankPart(
        segments=(Segment(num_layers=1, recompute=False),) * model.num_layers,
        shape=block_shape(model, compute="fp32", mean_context=model.max_seq_len / 2, tensor=tensor, fused=fused),
        num_tokens=model.max_seq_len,
        tensor=tensor,
        zero_stage=zero_stage,
        sharing=1 if zero_stage == 0 else num_ranks // tensor,
        copies=num_ranks if zero_stage == 0 else 1,
        async_checkpoints=False,
    )
    memory = rank_memory(model, part)
    return memory.total - memory.process


def large_model(*, quick: bool) -> dict[str, float]:
    """The planner on a model of 175 billion parameters: states in all, and the fewest hosts of 8 x 80 GB that do."""
    model, card = MODELS[LARGE], DEVICES["h100"]
    facts = {"states": 16.0 * model.num_parameters}
    for num_hosts in () if quick else (4, 8, 16, 32):
        cluster = Cluster(
            num_hosts=num_hosts,
            devices_per_host=8,
            memory_bytes=card.memory_bytes,
            compute=card.rate("bf16", name="h100"),
            host_bytes_per_s=card.host_bytes_per_s,
            network_bytes_per_s=card.network_bytes_per_s,
        )
        job = TrainingJob(model=model, seq_len=model.max_seq_len, batch_tokens=model.max_seq_len * 1536)
        try:
            fitting = propose(job, cluster).fitting
        except ConfigError:
            continue
        if fitting:
            least = min(fitting, key=lambda one: one.memory.total)
            return facts | {"devices": float(cluster.num_devices), "per device": float(least.memory.total)}
    return facts


def measurement(
    found: Mapping[Case, Sequence[Measured]],
    estimates: Mapping[Case, int],
    model: ModelConfig,
    *,
    large: Mapping[str, float],
) -> Measurement:
    names = {case: case_name(*case) for case in found}
    return Measurement(
        samples={
            **{f"{STATES}{names[case]}": [one.states_bytes for one in repeats] for case, repeats in found.items()},
            **{f"{PEAK}{names[case]}": [one.peak_bytes for one in repeats] for case, repeats in found.items()},
            MEMORY_ERRORS: [
                100 * (estimates[case] / one.peak_bytes - 1) for case, repeats in found.items() for one in repeats
            ],
            **{f"{PLANNED}{what}": [value] for what, value in large.items()},
        },
        conditions={
            "parameters": model.num_parameters,
            "rows": f"one of {model.max_seq_len} tokens on each rank",
            "states in theory": "12 bytes a parameter between steps, divided by the ranks",
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    cases = names_between(samples, STATES)
    off = []
    for case in cases:
        sharded, ranks = case.removesuffix(" ranks").split(", ")
        theory = theory_bytes(int(conditions["parameters"]), sharded, int(ranks))
        off.append(estimate([100 * abs(value / theory - 1) for value in samples[STATES + case]]))
    repeats = len(samples[MEMORY_ERRORS]) // len(cases)
    sizes = list(map(abs, samples[MEMORY_ERRORS]))
    errors = [estimate(sizes[start : start + repeats]) for start in range(0, len(sizes), repeats)]
    worst, worst_error = (max(each, key=lambda one: one.mean) for each in (off, errors))
    what = "largest error of states"
    judgment.ask("largest error of states against theory", worst, "%", "<=", TARGET, what=what)
    judgment.ask("planner's largest error", worst_error, "%", "<=", TARGET)
    judgment.show(samples, {f"states on a rank, {case}": STATES + case for case in cases}, "MiB", 1 / 2**20)
    if BOTH_WAYS in cases:
        pairs = zip(samples[STATES + BOTH_WAYS], samples[STATES + ALONE], strict=True)
        judgment.show({"share": [split / whole for split, whole in pairs]}, {SPLIT_SHARE: "share"})
    judgment.said.append(
        f"states at most {worst.mean:.1f}% off theory over {len(cases)} cases, the planner's peaks "
        f"{worst_error.mean:.1f}% (resident memory)"
    )
    with judgment.beside():  # what the planner says of a model of the published size
        states = samples[PLANNED + "states"][0] / 1e12
        judgment.ask("175B, states in all, planned", states, "TB")
        judgment.said.append(
            f"a model of {MODELS[LARGE].num_parameters / 1e9:.0f} billion parameters has {states:.2f} TB of states "
            "here (16 bytes a parameter: FP32 weights, gradients and Adam), which dividing does not make less in all"
        )
        devices, each = samples[PLANNED + "devices"][0], samples[PLANNED + "per device"][0]
        judgment.ask("175B, 80 GB devices needed, planned", devices)
        judgment.ask("175B, on each device, planned", each / 1e9, "GB")
        judgment.ask("175B, in all, planned", devices * each / 1e12, "TB")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    quick_decides=True,
    statement="Dividing optimizer states, gradients and parameters among n ranks leaves each with an n-th of "
    "the states.",
    source="Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020 "
    "(arXiv:1910.02054)",
    published="1.2 TB -> 300 to 384 GB for a model of 175 billion parameters; in theory 1/n of the states at stage 3",
    compared="memory held between steps and peak of a step on one rank of 1 and 2 by ZeRO stage, and of 4 and 8 at "
    "stage 3, with matrices split in two as well, against 12 bytes a parameter over n and against the planner; the "
    "large model by the planner alone",
    target=f"states within {TARGET:.0f}% of theory and the planner's peaks within {TARGET:.0f}% of what was measured",
)
