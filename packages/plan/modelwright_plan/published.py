"""Published training runs (`published_runs.yaml`) beside what the planner predicts for their layouts, and how much time
interruptions leave for work at the rate of failures that Llama 3's report states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, get_args

import yaml

from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.estimate.cost import duration
from modelwright.pipeline.estimate.layout import Layout, TrainingJob
from modelwright.train.memory.activations import ActivationCheckpointingConfig, Mode
from modelwright_plan.catalog import DEVICES, MODELS
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s
from modelwright_plan.layout_search import Assessment, Cluster, assess

DATA_FILE = "published_runs.yaml"
CLOSE_PERCENT = 15.0
DEVICES_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published run and its prediction. row: the run as in the data file; step_s: published seconds of a step."""

    row: dict[str, Any]
    source: str
    job: TrainingJob
    cluster: Cluster
    step_s: float
    predicted: Assessment

    @property
    def error_percent(self) -> float:
        """Error of the predicted time of a step."""
        return 100 * (self.predicted.step_s / self.step_s - 1)

    @property
    def memory_error_percent(self) -> float | None:
        """Error of the predicted memory of the fullest device; None if none is published."""
        published = self.row.get("memory_gib")
        return 100 * (self.predicted.memory.total / 2**30 / published - 1) if published else None

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
        if row["source"] == "Narayanan 2021":
            # Equation 3: with recomputation, which is a fourth pass, and attention to all positions.
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
    )


def _model(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, context: int) -> ModelConfig:
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
        tie_embeddings=vocabulary > 50_000,
    )
