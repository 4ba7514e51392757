"""The switches of a training run, each with the settings that turn it on, and a batch to train two steps on.

Used for every pair of them on the CPU, and for each alone on a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import tiny_run
import torch

from modelwright.core.config import ConfigError, parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.config import TrainConfig, check_layout
from modelwright.train.job import TrainResult
from modelwright.train.precision.apply import fp32_products

SHAPE = ModelConfig(
    vocab_size=16, num_layers=2, model_dim=16, num_heads=2, num_kv_heads=2, ffn_dim=32, head_dim=8, max_seq_len=16
)
BASE = {
    "num_steps": 2,
    "batch_tokens": 8 * 16,
    "precision": {"policy": "fp32", "fp32_matmul": "default"},
    "eval_every_steps": 0,
    "checkpoint_every_steps": 0,
    "checkpoint_every_minutes": 0.0,
    "keep_best": False,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "INT8 gradients": {"gradient_sync": {"kind": "int8"}},
    "PowerSGD": {"gradient_sync": {"kind": "powersgd", "powersgd_rank": 2}},
    "three-level compression": {"gradient_sync": {"kind": "topk_quantized"}},
    "planned collectives": {
        "gradient_sync": {"kind": "topology_aware", "topology": {"algorithm": "ring", "measure_s": 0.01}}
    },
    "local steps": {"gradient_sync": {"local_sgd": {"sync_every_steps": 2}}},
    "delayed": {"async_updates": {"mode": "delayed"}},
    "Hogwild": {"async_updates": {"mode": "hogwild"}},
    "optimizer in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
}
SWITCHES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "BF16 gradients": {"gradient_sync": {"kind": "bf16"}},
    "clipped by the last norm": {"optimizer_in_backward": True},
    "delay compensation": {"async_updates": {"mode": "delayed", "delay_compensation": 0.5}},
    "own updates kept": {"gradient_sync": {"local_sgd": {"sync_every_steps": 2, "keep_residual": True}}},
    "shared second moments": {"gradient_sync": {"local_sgd": {"sync_every_steps": 2, "sync_second_moment_every": 2}}},
    "no overlap": {"gradient_sync": {"overlap": False}},
    "offloaded optimizer": {"optimizer_cpu_offload": True},
    "AdamW, INT8 states": {"optimizer": "adamw_8bit"},
    "AdamW, BF16 states": {"optimizer": "adamw_bf16_states"},
    "Lion": {"optimizer": "lion"},
    "Muon": {"optimizer": "muon"},
    "no clipping": {"max_grad_norm": 0.0},
    "adaptive clipping": {"adaptive_clip": {"kind": "percentile"}},
    "dynamic decay": {"weight_decay_schedule": {"grad_norm_threshold": 5.0}},
    "pull to the start": {"l2_sp": 0.1},
    "elastic consolidation": {"ewc": {"strength": 1.0}},
    "loss spikes": {"loss_spikes": {"num_sigmas": 6.0}},
    "rollback": {
        "loss_spikes": {"num_sigmas": 6.0, "rollback_after": 2, "lr_factor_steps": 2},
        "checkpoint_every_steps": 2,
    },
    "frozen prefix": {"sparse_updates": {"kind": "freeze_prefix", "keep_fraction": 0.5}},
    "sparse columns": {"sparse_updates": {"kind": "columns", "keep_fraction": 0.5}},
    "batch selection": {"batch_selection": {"signal": "loss", "keep_fraction": 0.5, "probe_tokens": 8}},
    "selection by start loss": {
        "batch_selection": {"signal": "random", "keep_fraction": 0.5, "probe_tokens": 8, "max_initial_loss": 2.0}
    },
    "BF16": {"precision": {"policy": "bf16_mixed"}},
    "FP16": {"precision": {"policy": "fp16_mixed"}},
    "pure FP16": {"precision": {"policy": "pure_fp16"}},
    "FP8": {"precision": {"policy": "fp8"}},
    "FP8, delayed scaling": {
        "precision": {"policy": "fp8", "fp8": {"scaling": "delayed", "save_quantized_input": True}}
    },
    "INT8": {"precision": {"policy": "int8"}},
    "formats by schedule": {"precision": {"adaptive": {"kind": "schedule", "schedule": [[0, 0.5]]}}},
    "formats by rules": {"precision": {"adaptive": {"kind": "rules", "decide_every_steps": 2}}},
    "TF32": {"precision": {"fp32_matmul": "tf32"}},
    "oneDNN": {"precision": {"fp32_matmul": "onednn"}},
    "rate scaled to the batch": {"lr_scaling": "sqrt"},
    "compiled": {"compile": True},
    "recomputed": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}},
    "selective recomputation": {"activation_checkpointing": {"mode": "selective", "save_outputs_of": ["attend"]}},
    "activation budget": {"activation_checkpointing": {"mode": "budget", "budget_bytes": 10**9}},
    "offloaded activations": {"activation_checkpointing": {"offload": "disk"}},
    "balanced tokens": {"load_balance": {"tokens": True}, "gradient_accumulation_steps": 2},
    "balanced stages": {"load_balance": {"pipeline": True}},
    "microbatches": {"gradient_accumulation_steps": 2},
    "checkpoints in memory": {"fault_tolerance": {"in_memory_checkpoint_every_steps": 2}},
    "evaluation": {"eval_every_steps": 2, "keep_best": True},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "adapters": {"lora": {"r": 2, "lora_dropout": 0.1, "use_dora": True}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"shared_memory": False},
    "shared memory": {"shared_memory": True},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "ring attention": {"context": 2, "context_attention": "ring"},
    "tensor": {"tensor": 2},
    "tensor, whole sequences": {"tensor": 2, "sequence_parallel": False},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
}


def dotted(settings: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield from dotted(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Settings of both; where they set one key, the second one's."""
    both = dict(one)
    for key, value in other.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def batch(number: int = 0) -> TokenBatch:
    """Eight rows of two documents; the odd ones end in padding."""
    ids_BT = (torch.arange(16) * 3 + torch.arange(8)[:, None] + number) % 16
    segments_BT = (torch.arange(16) >= 6).int().repeat(8, 1)
    segments_BT[1::2, 12:] = -1
    labels_BT = torch.cat([ids_BT[:, 1:], ids_BT[:, :1]], dim=1)
    labels_BT[:, 5] = labels_BT[:, 15] = -100
    labels_BT[1::2, 11:] = -100
    positions_BT = torch.cat([torch.arange(6), torch.arange(10)]).repeat(8, 1)
    return TokenBatch(input_ids_BT=ids_BT, labels_BT=labels_BT, positions_BT=positions_BT, segments_BT=segments_BT)


class Rows:
    num_batches_per_epoch = 5

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return batch(index).split(world_size)[rank]


def configuration(switches: Sequence[str]) -> TrainConfig:
    return parse(TrainConfig, reduce(merged, (SWITCHES[name] for name in switches), BASE), constants=True)


def refusal(switches: Sequence[str], parallel: ParallelConfig | None = None, *, num_processes: int = 1) -> str:
    """Why these switches are refused by the checks that a run makes before it builds anything, or ""."""
    try:
        config = configuration(switches)
        check_layout(config, parallel or ParallelConfig(), num_processes=num_processes)
        with fp32_products(onednn=config.precision.fp32_matmul == "onednn"):
            pass  # refused on processors without it
    except ConfigError as error:
        return str(error)
    return ""


def train(switches: Sequence[str], folder: Path, world: World, layout: str = "") -> TrainResult:
    """Train two steps with all of the switches."""
    model = Decoder(SHAPE)
    model.init_weights(0)
    config = configuration(switches)
    result = tiny_run.run(
        folder,
        config,
        model=model,
        objective=NextToken(Rows()),
        world=world,
        parallel=parse(ParallelConfig, LAYOUTS.get(layout, {})),
        heldout=[batch(9)] if config.eval_every_steps else [],
        old_rows=[batch(7)],
    )
    assert result.num_steps == 2
    assert math.isfinite(result.loss)
    return result
