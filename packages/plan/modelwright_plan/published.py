"""Published training runs (`published_runs.yaml`) next to what the planner predicts for their layouts, and how much
time interruptions leave for work at the rate of failures that Llama 3's report states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, get_args

import yaml

from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.estimate.cost import RankPart, duration, head_workspace, rank_memory
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, rank_parts
from modelwright.train.memory.activations import FP32_BYTES, ActivationCheckpointingConfig, Mode
from modelwright_plan.catalog import DEVICES, MODELS
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s
from modelwright_plan.layout_search import Assessment, Cluster, assess

DATA_FILE = "published_runs.yaml"
CLOSE_PERCENT = 15.0
DEVICES_PER_HOST = 8
LOSS_BYTES = 12
"""Bytes of a logit in backward through PyTorch's `cross_entropy`, which these runs use and we do not: output of the
log-softmax, the gradient of the loss and that of the logits, in FP32."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published run and its prediction. row: the run as in the data file; step_s: published seconds of a step."""

    row: dict[str, Any]
    source: str
    job: TrainingJob
    cluster: Cluster
    step_s: float
    predicted: Assessment
    memory_bytes: int
    """Predicted memory of the fullest device, with the loss of all logits at once, as these runs computed it."""

    @property
    def error_percent(self) -> float:
        """Error of the predicted time of a step."""
        return 100 * (self.predicted.step_s / self.step_s - 1)

    @property
    def memory_error_percent(self) -> float | None:
        """Error of the predicted memory of the fullest device; None if none is published."""
        published = self.row.get("memory_gib")
        return 100 * (self.memory_bytes / 2**30 / published - 1) if published else None

    @property
    def utilization(self) -> float:
        """Published model FLOPs as a share of the peak, counted as in the prediction."""
        return self.predicted.utilization(self.cluster) * self.predicted.step_s / self.step_s


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Reads the published runs and predicts each."""
    data = yaml.safe_load((files("modelwright_plan") / DATA_FILE).read_text(encoding="utf-8"))
    return tuple(_compare(row, data) for row in data["rows"])


def _compare(row: dict[str, Any], data: dict[str, Any]) -> Comparison:
    name, device = row["model"], DEVICES[row["device"]]
    model = MODELS[name] if name in MODELS else _model(*data["models"][name])
    seq_len, num_devices, num_stages = row["seq_len"], row["devices"], row.get("stages_per_rank", 1)
    job = TrainingJob(
        model=model, seq_len=seq_len, batch_tokens=row["batch"] * seq_len, compute=row.get("compute", "bf16")
    )
    pipeline, recompute = row.get("pipeline", 1), row.get("recompute", "none")
    # Megatron-LM and torchtitan give every stage the same number of layers where they divide.
    stages = pipeline * num_stages
    even = (model.num_layers // stages,) * stages if stages > 1 and model.num_layers % stages == 0 else ()
    layout = Layout(
        parallel=ParallelConfig(
            pipeline=pipeline,
            tensor=row.get("tensor", 1),
            zero_stage=row.get("zero", 0),
            schedule="interleaved" if num_stages > 1 else "1f1b",
            stages_per_rank=num_stages,
            layers_per_stage=even,
            sequence_parallel=row.get("sequence_parallel", True),
        ),
        num_devices=num_devices,
        microbatch_rows=row["rows"],
        activations=ActivationCheckpointingConfig(mode=recompute, layers_per_segment=1)
        if recompute in get_args(Mode)
        else ActivationCheckpointingConfig(mode="selective", save_outputs_of=tuple(recompute)),
    )
    device = replace(device, memory_bytes_per_s=row.get("memory_bytes_per_s", device.memory_bytes_per_s))
    cluster = Cluster(
        num_hosts=num_devices // DEVICES_PER_HOST,
        devices_per_host=DEVICES_PER_HOST,
        memory_bytes=device.memory_bytes,
        compute=device.rate(job.compute, name=row["device"]),
        host_bytes_per_s=device.host_bytes_per_s,
        network_bytes_per_s=device.network_bytes_per_s,
    )
    predicted = assess(job, layout, cluster)
    if "step_s" in row:
        step_s = row["step_s"]
    elif "tokens_per_s" in row:
        step_s = job.batch_tokens / (row["tokens_per_s"] * num_devices)
    else:
        flops = predicted.model_flops
        if row.get("counts") == "recomputed":
            # Equation 3 of Narayanan et al. 2021: recomputation is a fourth pass, and attention sees all positions.
            flops = 4 / 3 * 3 * job.batch_tokens * model.flops_per_token(seq_len)
            flops -= job.batch_tokens * 2 * model.vocab_size * model.model_dim  # the head is not computed again
        step_s = flops / (row["teraflops"] * 1e12 * num_devices)
    return Comparison(
        row=row,
        source=data["sources"][row["source"]],
        job=job,
        cluster=cluster,
        step_s=step_s,
        predicted=predicted,
        memory_bytes=max(_memory_bytes(model, part) for part in rank_parts(job, layout).values()),
    )


def _memory_bytes(model: ModelConfig, part: RankPart) -> int:
    """Returns the memory of a rank that computes PyTorch's loss of all logits of a microbatch at once."""
    chunked = rank_memory(model, part).on_device("cuda").total
    if not part.has_head:
        return chunked
    whole = replace(part, head_chunk_tokens=part.num_tokens)
    logit_bytes = LOSS_BYTES * part.num_tokens * model.vocab_size // part.tensor
    table_bytes = FP32_BYTES * model.vocab_size * model.model_dim // part.tensor
    at_head = rank_memory(model, whole).on_device("cuda").total - head_workspace(model, whole)
    return max(chunked, at_head + logit_bytes + table_bytes)


def _model(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, context: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        num_layers=layers,
        model_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        ffn_dim=ffn,
        max_seq_len=context,
        qk_norm=False,
        tie_embeddings=tied,
    )


_HEAD = (
    "| source | model | cards | pp x dp x cp x tp | row | format | recomputed | used for | step, published | predicted "
    "| error | MFU, published | predicted | memory, published | predicted | error |"
)


def published_table(found: Sequence[Comparison]) -> str:
    """Formats the comparisons in Markdown: table, sources, remarks, and how many are close."""
    lines, notes = [_HEAD, "|" + " --- |" * (_HEAD.count("|") - 1)], dict[str, str]()
    for one in found:
        row, axes = one.row, one.predicted.layout.axes
        name = row["source"]
        if note := row.get("note"):
            name += f" ({notes.setdefault(note, chr(ord('a') + len(notes)))})"
        recompute = row.get("recompute", "none")
        memory = ("-", "-", "-")
        if (memory_error := one.memory_error_percent) is not None:
            memory = (f"{row['memory_gib']:.1f} GiB", f"{one.memory_bytes / 2**30:.1f} GiB", f"{memory_error:+.0f}%")
        cells = (
            name,
            row["model"],
            f"{row['devices']:,} {row['device']}",
            f"{axes['pipeline']} x {axes['replicate'] * axes['shard']} x {axes['context']} x {axes['tensor']}",
            f"{row['seq_len']:,}",
            one.job.compute,
            recompute if isinstance(recompute, str) else "half of the products",
            {"fit": "fitting", "test": "testing"}[row["use"]],
            f"{one.step_s:.3g} s",
            f"{one.predicted.step_s:.3g} s",
            f"{one.error_percent:+.0f}%",
            f"{one.utilization:.1%}",
            f"{one.predicted.utilization(one.cluster):.1%}",
            *memory,
        )
        lines.append(f"| {' | '.join(cells)} |")
    sources = {one.row["source"]: one.source for one in found}
    lines += ["", *(f"- {name}: {text}" for name, text in sources.items())]
    lines += [f"- ({letter}) {note}" for note, letter in notes.items()]
    for use, what in (("fit", "fitting"), ("test", "testing")):
        errors = [abs(one.error_percent) for one in found if one.row["use"] == use]
        close = sum(error <= CLOSE_PERCENT for error in errors)
        lines += ["", f"Step of {close} of {len(errors)} rows for {what} within {CLOSE_PERCENT:.0f}%."]
    errors = [abs(error) for one in found if (error := one.memory_error_percent) is not None]
    close = sum(error <= CLOSE_PERCENT for error in errors)
    lines += ["", f"Memory of {close} of {len(errors)} rows within {CLOSE_PERCENT:.0f}%."]
    return "\n".join([*lines, "", *(interruptions_text(num_devices) for num_devices in (1024, LLAMA_3_DEVICES))])


def published_data(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Returns the comparisons as plain data."""
    return [
        {
            **one.row,
            "source_text": one.source,
            "published_step_s": one.step_s,
            "predicted_step_s": one.predicted.step_s,
            "error_percent": one.error_percent,
            "published_utilization": one.utilization,
            "predicted_utilization": one.predicted.utilization(one.cluster),
            "predicted_memory_bytes": one.memory_bytes,
            "memory_error_percent": one.memory_error_percent,
        }
        for one in found
    ]


LLAMA_3_DEVICES, LLAMA_3_INTERRUPTIONS, LLAMA_3_DAYS = 16_384, 419, 54
"""Unexpected interruptions of Llama 3's training (Grattafiori et al. 2024, section 3.3.4), which report more than 90%
effective training time."""
ASSUMED_COSTS = CheckpointCosts(stall_s=10.0, recovery_s=600.0)
"""Stall of a checkpoint and recovery; the report states neither."""


def work_share(num_devices: int, costs: CheckpointCosts = ASSUMED_COSTS) -> tuple[float, float, float]:
    """Returns the mean seconds between interruptions at the published rate of failures, Daly's interval between
    checkpoints, and the expected share of time that is work at that interval.
    """
    mtbf_s = LLAMA_3_DAYS * 86_400 / LLAMA_3_INTERRUPTIONS * LLAMA_3_DEVICES / num_devices
    interval_s = daly_interval_s(costs.stall_s, mtbf_s)
    return mtbf_s, interval_s, interval_s / expected_wall_s(interval_s, interval_s, costs, mtbf_s)


def interruptions_text(num_devices: int) -> str:
    """Describes interruptions of a run on that many devices, and what they leave for work."""
    mtbf_s, interval_s, share = work_share(num_devices)
    return (
        f"Interruptions: one in {duration(mtbf_s)} on {num_devices:,} devices at Llama 3's rate "
        f"({LLAMA_3_INTERRUPTIONS} in {LLAMA_3_DAYS} days on {LLAMA_3_DEVICES:,}, where more than 90% of the time was "
        f"work); with a checkpoint every {duration(interval_s)} {share:.1%} of the time is work, if one stalls it "
        f"{ASSUMED_COSTS.stall_s:.0f} s and a recovery takes {duration(ASSUMED_COSTS.recovery_s)} (assumed; "
        "`modelwright plan spot` takes measured ones)."
    )
