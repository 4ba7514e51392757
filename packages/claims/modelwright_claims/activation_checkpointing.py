"""Claim: computing activations again in units of layers saves most of their memory for a fraction more compute."""

from collections.abc import Mapping, Sequence

from modelwright.core.config import dump
from modelwright.model.decoder import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.pipeline.estimate.cost import training_memory
from modelwright.train.memory.activations import ActivationCheckpointingConfig, block_shape
from modelwright_claims import memory_probe
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.memory_probe import Measured, Probe
from modelwright_claims.statistics import exact, percent_saved, ratios

SAVED_TARGET = 70.0
COMPUTE_TARGET = 33.0
PUBLISHED_UNIT = "unit of 8"
NONE = "none"
MEMORY_ERRORS = "memory model's error, %"
PEAK, STATES, STEP, FLOPS = "peak bytes, ", "bytes of states, ", "step seconds, ", "FLOPs of a step, "


def measure(setting: Setting) -> Measurement:
    """A deep and narrow model, every unit size that halves its layers, selection, and a budget of half the memory."""
    num_layers, width, seq_len, rows = (8, 64, 128, 16) if setting.quick else (32, 128, 256, 8)
    model = memory_probe.probe_model(
        model_dim=width, num_layers=num_layers, vocab_size=512, seq_len=seq_len, head_dim=32, tie_embeddings=True
    )
    result: dict[str, list[Measured]] = {name: [] for name in configs(model, rows * seq_len)}
    for repeat in range(1 if setting.quick else 3):
        for name, config in configs(model, rows * seq_len).items():
            setting.progress.note(f"activation_checkpointing: {name}, repeat {repeat + 1}")
            result[name] += memory_probe.measure(probe(model, rows, config, count_flops=repeat == 0))
    estimates = {
        name: estimated_bytes(model, rows * seq_len, config) for name, config in configs(model, rows * seq_len).items()
    }
    return Measurement(
        samples=samples_of(result, estimates),
        conditions={
            "parameters": model.num_parameters,
            "layers": model.num_layers,
            "width": model.model_dim,
            "batch": f"{rows} rows of {seq_len} tokens, one microbatch",
            "format": "fp32",
        },
    )


def samples_of(found: Mapping[str, Sequence[Measured]], estimates: Mapping[str, int]) -> dict[str, list[float]]:
    return {
        **{f"{PEAK}{name}": [m.peak_bytes for m in runs] for name, runs in found.items()},
        **{f"{STATES}{name}": [m.states_bytes for m in runs] for name, runs in found.items()},
        **{f"{STEP}{name}": [m.step_s for m in runs] for name, runs in found.items()},
        **{f"{FLOPS}{name}": [max(m.flops for m in runs)] for name, runs in found.items()},
        MEMORY_ERRORS: [100 * (estimates[name] / m.peak_bytes - 1) for name, runs in found.items() for m in runs],
    }


def configs(model: ModelConfig, num_tokens: int) -> dict[str, ActivationCheckpointingConfig]:
    """Return the compared configurations by name; units from 1 to all layers."""
    fused = cpu_kernels.are_used_on("cpu")
    shape = block_shape(model, compute="fp32", mean_context=model.max_seq_len / 2, fused=fused)
    whole = num_tokens * (model.num_layers * shape.whole_bytes + shape.workspace_bytes)
    units = [2**k for k in range(model.num_layers.bit_length()) if 2**k <= model.num_layers]
    return {
        NONE: ActivationCheckpointingConfig(),
        **{f"unit of {n}": ActivationCheckpointingConfig(mode="full", layers_per_segment=n) for n in units},
        "selective": ActivationCheckpointingConfig(mode="selective"),
        "budget of half": ActivationCheckpointingConfig(mode="budget", budget_bytes=whole // 2),
    }


def probe(model: ModelConfig, rows: int, config: ActivationCheckpointingConfig, *, count_flops: bool) -> Probe:
    return memory_probe.fp32_probe(model, rows=rows, count_flops=count_flops, activation_checkpointing=dump(config))


def estimated_bytes(model: ModelConfig, num_tokens: int, config: ActivationCheckpointingConfig) -> int:
    """Return the planner's estimate of the same run."""
    memory = training_memory(
        model,
        tokens_per_microbatch=num_tokens,
        compute="fp32",
        activations=config,
        async_checkpoints=False,
        fused=cpu_kernels.are_used_on("cpu"),
    )
    return memory.total - memory.process


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Savings are shares of the memory above the states, repeat by repeat."""
    judgment = Judgment()
    names = [name for name in names_between(samples, PEAK) if name != NONE]
    units = [name for name in names if name.startswith("unit")]
    above = {
        name: [peak - states for peak, states in zip(samples[PEAK + name], samples[STATES + name], strict=True)]
        for name in (NONE, *names)
    }
    saved = {name: percent_saved(above[name], above[NONE]) for name in names}
    for name in names:
        judgment.ask(f"memory saved, {name}", saved[name], "%")
    for name in names:
        judgment.ask(f"time of a step, {name}", ratios(samples[STEP + name], samples[STEP + NONE]), "x")
    judgment.ask("planner's largest error", max(map(abs, samples[MEMORY_ERRORS])), "%")
    best = max(units, key=lambda name: saved[name].mean)
    published = PUBLISHED_UNIT if PUBLISHED_UNIT in units else units[-1]
    judgment.said.append(
        f"{best} saves {saved[best].mean:.0f}% of what a step takes above weights and optimizer states, {published} "
        f"{saved[published].mean:.0f}%. A unit is whole in memory while it runs backward, so larger ones save less "
        "from some size on"
    )
    if all(saved[name].lower < SAVED_TARGET for name in units):
        judgment.check(f"memory saved by {best}", saved[best], SAVED_TARGET, "%", ">=")
    with judgment.part():
        more = {name: 100 * (samples[FLOPS + name][0] / samples[FLOPS + NONE][0] - 1) for name in names}
        for name in names:
            judgment.ask(f"more FLOPs, {name}", exact(more[name]), "%")
        judgment.said.append(f"{more[best]:.0f}% and {more[published]:.0f}% more FLOPs (counted)")
        enough = [name for name in units if saved[name].lower >= SAVED_TARGET] or units
        cheapest = min(enough, key=lambda name: more[name])
        judgment.ask("", exact(more[cheapest]), "%", "<=", COMPUTE_TARGET, what=f"more FLOPs of {cheapest}")
    return judgment.verdict()


CLAIM = declared(__name__)
