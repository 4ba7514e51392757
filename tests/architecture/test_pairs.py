"""Every pair of switches of a training run either trains two steps or is refused with one clear error.

Refusals are checked without training. The pairs that are left are trained many at a time, by a covering array: every
pair is in one of its runs. The switches are checked against the configuration: a new setting that can be switched on
must be listed here.
"""

import dataclasses
import math
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny_run

from covering_array import Pair, covering_array, pairs_of
from distributed import run_distributed
from modelwright.core.config import parse
from modelwright.core.errors import ConfigError
from modelwright.data.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, single
from modelwright.precision.apply import fp32_products
from modelwright.train import parallelize, trainer
from modelwright.train.config import TrainConfig, check_layout

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
    "loss scales per layer": {"precision": {"policy": "fp16_mixed", "loss_scale": {"per_layer": True}}},
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
    "stop when memory is full": {"fault_tolerance": {"on_out_of_memory": "fail"}},
    "checkpoints in memory": {"fault_tolerance": {"in_memory_checkpoint_every_steps": 2}},
    "step arena": {"step_arena": True},
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
WITHIN_A_SWITCH = {
    "num_tokens": "another unit for the length",
    "num_epochs": "another unit for the length",
    "schedule": "the shape of the learning rate, a function of the step",
    "adaptive_clip": "figures of adaptive clipping",
    "precision.overrides": "another format for a part, of those that policies give",
    "precision.output_dtype": "another format for the residual stream",
    "precision.eval_dtype": "formats of the evaluation",
    "precision.fp8": "figures of FP8",
    "precision.int8": "figures of INT8",
    "precision.adaptive.low_precision": "a format that a policy can give, too",
    "precision.loss_scale": "figures of the loss scale, which FP16 switches on",
    "activation_checkpointing.offload_dir": "where activations are offloaded to",
    "activation_checkpointing.flops_per_byte": "a figure of the machine",
    "gradient_sync.topk_quantized": "figures of three-level compression",
    "gradient_sync.topology": "figures of planned collectives",
    "gradient_sync.local_sgd.outer_momentum": "a figure of local steps",
    "sparse_updates.density_schedule": "how the share of the units changes",
    "sparse_updates.signal": "how units are chosen",
    "sparse_updates.use_feedback": "how units are chosen",
    "batch_selection.dense_fraction": "when rows begin to be chosen",
    "checkpoint_every_minutes": "another unit for the checkpoints",
    "lora.use_rslora": "a factor of the adapters",
    "lora.base_format": "tensor parallelism takes it for some widths only; trained under layouts in test_adapters.py",
    "batching": "the order of rows, which the loader of a stage gives and no step knows",
}
"""Settings, or groups of them, that a switch of the list brings with it, and why they need no switch of their own."""


def leaves(cls: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and default of every setting."""
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{path}{entry.name}.")
        else:
            yield f"{path}{entry.name}", hint, getattr(cls(num_steps=1) if cls is TrainConfig else cls(), entry.name)


def dotted(settings: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield from dotted(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]


def test_every_setting_that_can_be_switched_on_is_listed() -> None:
    listed = {name for settings in SWITCHES.values() for name in dotted(settings)} | set(dotted(BASE))
    for name, hint, default in leaves(TrainConfig):
        is_choice = hint is bool or typing.get_origin(hint) is typing.Literal
        can_be_switched_on = is_choice or (isinstance(default, (int, float)) and default == 0)
        groups = [".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 2)]
        explained = any(group in WITHIN_A_SWITCH for group in groups)
        assert not can_be_switched_on or name in listed or explained, f"{name}: add a switch for it to SWITCHES"
    names = [name for name, _, _ in leaves(TrainConfig)]
    for group in WITHIN_A_SWITCH:
        assert any(name == group or name.startswith(f"{group}.") for name in names), f"{group} is gone"


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


class Refusals:
    """Which switches a layout refuses, by the checks that a run makes before it builds anything."""

    def __init__(self, layout: str = "", *, num_processes: int = 1) -> None:
        self.parallel = parse(ParallelConfig, LAYOUTS.get(layout, {}))
        self.num_processes = num_processes

    def text(self, switches: Sequence[str]) -> str:
        """Why these switches are refused, or ""."""
        try:
            config = configuration(switches)
            check_layout(config, self.parallel, num_processes=self.num_processes)
            with fp32_products(onednn=config.precision.fp32_matmul == "onednn"):
                pass  # refused on processors without it
        except ConfigError as error:
            return str(error)
        return ""

    def can_combine(self, switches: Sequence[str]) -> bool:
        """Whether the switches train together, without one of them undoing a setting of another."""
        return not contradicts(switches) and not self.text(switches)


def contradicts(switches: Sequence[str]) -> bool:
    """Whether two of the switches give one setting different values."""
    values: dict[str, Any] = {}
    for name in switches:
        for key in dotted(SWITCHES[name]):
            value = reduce(lambda group, part: group[part], key.split("."), SWITCHES[name])
            if values.setdefault(key, value) != value:
                return True
    return False


def configuration(switches: Sequence[str]) -> TrainConfig:
    return parse(TrainConfig, reduce(merged, (SWITCHES[name] for name in switches), BASE), constants=True)


def train(switches: Sequence[str], layout: str, folder: Path, world: World) -> None:
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


def train_all(world: World, rows: list[list[str]], layout: str, folder: Path) -> None:
    """Train every row of switches; the error of a row that fails names its switches."""
    torch.set_num_threads(1)
    eager = partial(parallelize.compile_each_block, backend="eager")
    with (
        mock.patch.object(parallelize, "compile_each_block", eager),
        mock.patch.object(trainer, "give_back_memory"),  # a garbage collection, which takes longer than the run
        warnings.catch_warnings(),
    ):
        # torch.compile reads .grad of tensors that have none.
        warnings.filterwarnings("ignore", module="torch")
        for number, switches in enumerate(rows):
            try:
                train(switches, layout, folder / str(number), world)
            except Exception as error:
                raise AssertionError(f"{' + '.join([layout, *switches])}: does not train: {error!r}") from error
    torch.compiler.reset()  # other tests compile the same blocks


def assert_clear(text: str) -> None:
    """A refusal names the setting first, says why, and what to do, on one line."""
    key, _, why = text.partition(": ")
    assert why, text
    assert "\n" not in text
    root = key.split(".")[0]
    assert root == "parallel" or root in {entry.name for entry in dataclasses.fields(TrainConfig)}, text


def rows_to_train(refusals: Refusals, switches: Sequence[str], pairs: Iterable[Pair]) -> list[list[str]]:
    """A covering array of the pairs that train. Asserts that all others are refused clearly."""
    trains = [name for name in switches if refusals.can_combine([name])]
    for pair in map(sorted, pairs):
        if text := refusals.text(pair):
            assert_clear(text)
    required = [pair for pair in pairs if refusals.can_combine(sorted(pair))]
    return covering_array(trains, required, refusals.can_combine)


def test_pairs_of_switches_train_or_are_refused(tmp_path: Path) -> None:
    names = [name for name in SWITCHES if name not in STRATEGIES]
    rows = rows_to_train(Refusals(), names, pairs_of(names))
    train_all(single(), rows, "", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_switch_and_a_layout_train_or_are_refused(layout: str, tmp_path: Path) -> None:
    """On two processes. A strategy does little on one, so its pairs with switches are trained here, too."""
    refusals = Refusals(layout, num_processes=2)
    pairs = {pair for pair in pairs_of(SWITCHES) if pair & STRATEGIES.keys()} if layout == "shared memory" else set()
    for name in SWITCHES:
        if text := refusals.text([name]):
            assert_clear(text)
    run_distributed(train_all, 2, rows_to_train(refusals, list(SWITCHES), pairs), layout, tmp_path)


def test_a_refused_pair_does_not_train(tmp_path: Path) -> None:
    """The checks before a run are those of the run itself: what they refuse is refused there, with the same text."""
    pair = ["Hogwild", "Muon"]
    with pytest.raises(ConfigError) as refused:
        train(pair, "", tmp_path, single())
    assert str(refused.value) == Refusals().text(pair)


def test_most_pairs_train() -> None:
    """A rule that refused everything would pass the other tests."""
    names = ["BF16", "recomputed", "microbatches", "AdamW, INT8 states", "loss spikes", "balanced tokens", "evaluation"]
    assert Refusals().can_combine(names)
    refused = [pair for pair in pairs_of(SWITCHES) if Refusals().text(sorted(pair))]
    assert len(refused) < 250, f"{len(refused)} of {len(pairs_of(SWITCHES))} pairs are refused"
