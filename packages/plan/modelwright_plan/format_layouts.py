"""Proposals of layouts as plain text, or as plain data for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from modelwright.core.config import dump
from modelwright.pipeline.estimate.cost import MemoryEstimate, size
from modelwright.pipeline.estimate.layout import TrainingJob
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright_plan.layout_search import Assessment, Cluster, Proposal
from modelwright_plan.published import interruptions_text

_NO_ERROR = "the model's error has not been measured here (modelwright prove zero_memory activation_checkpointing)"


def proposal_text(
    job: TrainingJob, cluster: Cluster, proposal: Proposal, *, top: int, known_error: str, notes: Sequence[str] = ()
) -> str:
    """Formats the best layouts as a table, the first one in full, and the smallest of those that do not fit, with
    reasons. notes: remarks about the job; known_error: measured error of the memory model, "" if unknown.
    """
    model, states = job.model, 16 * job.model.num_parameters
    memory, total = cluster.memory_bytes, cluster.num_devices * cluster.memory_bytes
    inside, between, rate = cluster.host_bytes_per_s / 1e9, cluster.network_bytes_per_s / 1e9, cluster.compute
    lines = [
        f"model       {model.num_parameters / 1e9:.1f} billion parameters, {model.num_layers} layers of width "
        f"{model.model_dim}; rows of {job.seq_len}, {job.batch_tokens:,} tokens an update",
        f"states      {_decimal(states)} in all: weights, gradients and two optimizer states in FP32",
        f"cluster     {cluster.num_hosts} hosts x {cluster.devices_per_host} devices of {_decimal(memory)}, "
        f"{_decimal(total)} in all; {inside:.3g} GB/s in a host, {between:.3g} GB/s between",
        f"compute     {job.compute.upper()}, {rate.peak_flops_per_s / 1e12:.3g} TFLOP/s at the peak of a device; "
        f"products reach {rate.product_share:.0%} of it, attention {rate.attention_share:.0%}: {rate.source}",
        *(f"note        {note}" for note in notes),
        "",
    ]
    if proposal.fitting:
        shown = proposal.fitting[:top]
        lines += [f"{len(proposal.fitting)} meshes fit; the fastest {len(shown)}:", _HEAD]
        lines += [*(_row(result, cluster) for result in shown), "", *_details(job, shown[0])]
    else:
        lines.append("no layout fits")
    if proposal.too_large:
        lines += ["", f"{len(proposal.too_large)} meshes do not fit; the nearest:"]
    for result in proposal.too_large[:top]:
        axes, parts, needed = result.layout.axes, asdict(result.memory), result.memory
        data, zero_stage = f"{axes['replicate']}x{axes['shard']}", result.layout.parallel.zero_stage
        kind = f"mostly {max(parts, key=parts.__getitem__)}"
        kind = "its states alone" if needed.states > cluster.memory_bytes else kind
        lines.append(
            f"  pp {axes['pipeline']} data {data} cp {axes['context']} tp {axes['tensor']} ZeRO-{zero_stage}: needs "
            f"{_decimal(needed.total)} on its fullest device, {kind} ({_parts(needed)})"
        )
    lines += [f"  not possible: {reason}" for reason in proposal.refused[:3]]
    lines += ["", f"memory: {known_error or _NO_ERROR}"]
    if cluster.device == "cuda":
        lines += [
            "time: `modelwright plan published` compares it with published runs",
            interruptions_text(cluster.num_devices),
        ]
    else:
        lines.append("time: an estimate for ranking (--efficiency sets the share of the peak that training reaches)")
    return "\n".join(lines)


def proposal_data(job: TrainingJob, cluster: Cluster, proposal: Proposal) -> dict[str, Any]:
    """Returns the proposal as plain data."""

    def plain(found: Assessment) -> dict[str, Any]:
        return {
            "parallel": dump(found.layout.parallel),
            "activation_checkpointing": dump(found.layout.activations),
            "microbatch_rows": found.layout.microbatch_rows,
            "gradient_accumulation_steps": found.num_microbatches,
            "layers_per_stage": list(found.layers_per_stage),
            "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
            "total_bytes": found.memory.total * found.layout.num_devices,
            "step_s": found.step_s,
            "compute_s": found.compute_s,
            "recompute_s": found.recompute_s,
            "optimizer_s": found.optimizer_s,
            "bubble_share": found.bubble_share,
            "communication_s": dict(found.communication_s),
            "utilization": found.utilization(cluster),
        }

    return {
        "job": dump(job),
        "cluster": dump(cluster),
        "fitting": [plain(found) for found in proposal.fitting],
        "too_large": [plain(found) for found in proposal.too_large],
        "refused": list(proposal.refused),
    }


_HEAD = (
    f"{'pp':>4}{'data':>9}{'cp':>4}{'tp':>4}  {'shard':<10}{'schedule':<16}{'rows x m':>11}  {'activations':<11}"
    f"{'per device':>11}{'in all':>9}{'step':>9}{'bubble':>8}{'comm':>7}{'MFU':>6}"
)


def _row(found: Assessment, cluster: Cluster) -> str:
    layout, axes = found.layout, found.layout.axes
    data = f"{axes['replicate']}x{axes['shard']}"
    schedule = layout.parallel.schedule if axes["pipeline"] > 1 else "-"
    schedule += f" x{layout.parallel.stages_per_rank}" if layout.parallel.stages_per_rank > 1 else ""
    rows = f"{layout.microbatch_rows} x {found.num_microbatches}"
    communication = sum(found.communication_s.values()) / found.step_s
    return (
        f"{axes['pipeline']:>4}{data:>9}{axes['context']:>4}{axes['tensor']:>4}  {layout.parallel.zero_stage:<10}"
        f"{schedule:<16}{rows:>11}  {_activations(layout.activations):<11}{_decimal(found.memory.total):>11}"
        f"{_decimal(found.memory.total * layout.num_devices):>9}{found.step_s:>8.3g}s{found.bubble_share:>8.1%}"
        f"{communication:>7.1%}{found.utilization(cluster):>6.2f}"
    )


def _details(job: TrainingJob, found: Assessment) -> list[str]:
    """Formats the settings of the first layout, and its memory and time by part."""
    layout, memory = found.layout, found.memory
    plain = {"pipeline", "data", "context", "tensor", "zero_stage", "shard_group_size", "schedule", "stages_per_rank"}
    settings = {name: value for name, value in dump(layout.parallel).items() if name in plain and value not in (0, 1)}
    settings["zero_stage"] = layout.parallel.zero_stage
    if len(set(found.layers_per_stage)) > 1:
        settings["layers_per_stage"] = list(found.layers_per_stage)
    seconds = {"compute": found.compute_s, "computed again": found.recompute_s}
    seconds |= {"optimizer": found.optimizer_s, "bubble": found.bubble_s}
    seconds |= found.communication_s
    shown = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return [
        f"the first:  parallel: {{{shown}}}",
        f"            gradient_accumulation_steps: {found.num_microbatches}",
        f"            activation_checkpointing: {_activations(layout.activations)}",
        f"  memory    {_parts(memory)}",
        "  step      " + ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if value),
        f"  speed     {job.batch_tokens / found.step_s / layout.num_devices:,.0f} tokens/s on each device",
    ]


def _parts(memory: MemoryEstimate) -> str:
    parts = {name: value for name, value in asdict(memory).items() if value}
    return f"{_decimal(memory.total)} = " + ", ".join(f"{name} {_decimal(value)}" for name, value in parts.items())


def _activations(config: ActivationCheckpointingConfig) -> str:
    return f"full {config.layers_per_segment}" if config.mode == "full" else config.mode


def _decimal(num_bytes: float) -> str:
    """Formats bytes in the decimal units of memory vendors; small ones in powers of 1024."""
    if num_bytes < 1e9:
        return size(num_bytes)
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes < 1e12 else f"{num_bytes / 1e12:.2f} TB"
