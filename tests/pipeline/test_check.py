"""What training would refuse is refused before any data is prepared, with the full name of the field to change."""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.config import ConfigError, dump, merge
from modelwright.pipeline.run import check_training
from modelwright.pipeline.run_config import parse_run
from modelwright.recipes.load import recipe

Command = Callable[..., subprocess.CompletedProcess[str]]


def check(changes: Mapping[str, Any], num_processes: int) -> None:
    config = parse_run(merge(dump(recipe("tiny")), changes))
    check_training(config, config.parallel, num_processes=num_processes, stages=config.stage_names)


@pytest.mark.parametrize(
    ("changes", "num_processes", "message"),
    [
        ({"parallel": {"tensor": 2}}, 1, r"^parallel\.data: .* does not make 1 processes; start 2"),
        ({"parallel": {"data": 2, "tensor": 2}}, 2, r"^parallel\.data: .* start 4"),
        ({"parallel": {"zero_stage": 3, "shard_group_size": 4}}, 2, r"^parallel\.shard_group_size: 4 does not divide"),
        ({"parallel": {"zero_stage": 1, "shard_group_size": 1}}, 2, r"^parallel\.shard_group_size: 1 replica"),
        ({"parallel": {"shared_memory": False}, "pretrain": {"async_updates": {"mode": "hogwild"}}}, 2,
         r"^pretrain\.async_updates\.mode: hogwild needs one copy .* parallel\.shared_memory false takes away"),
        ({"stages": ["clean", "tokenize", "pack", "pretrain", "dpo"], "parallel": {"context": 2}}, 2,
         r"^dpo: needs whole rows on every rank, which parallel\.context 2 takes away"),
        ({"parallel": {"tensor": 8}}, 8, r"^parallel\.tensor: 8 does not fit the model \(model\.num_heads: 4"),
        (
            {
                "parallel": {"pipeline": 2},
                "pretrain": {"optimizer_in_backward": True, "max_grad_norm": 0, "gradient_accumulation_steps": 2},
            },
            2,
            r"^pretrain\.parallel\.pipeline: 2 needs whole gradients",
        ),
        (
            {"parallel": {"zero_stage": 3}, "pretrain": {"optimizer": "muon"}},
            2,
            r"^pretrain\.optimizer: muon needs whole weight matrices",
        ),
        (
            {"parallel": {"tensor": 2}, "pretrain": {"sparse_updates": {"kind": "layers"}}},
            2,
            r"^pretrain\.sparse_updates\.kind: layers needs a whole model",
        ),
        (
            {"pretrain": {"gradient_accumulation_steps": 4, "batch_selection": {"signal": "loss"}}},
            1,
            r"^pretrain\.batch_selection\.keep_fraction: 0\.4 of 4 rows",
        ),
        (
            {"pretrain": {"batch_selection": {"signal": "loss_change", "max_initial_loss": 1.0}}},
            1,
            r"^pretrain\.batch_selection\.max_initial_loss: the initial weights of a run from scratch",
        ),
        ({"parallel": {"pipeline": 3}}, 3, r"^parallel\.pipeline: 2 layers cannot form 3 stages"),
        ({"parallel": {"pipeline": 2, "layers_per_stage": [2, 1]}}, 2, r"^parallel\.layers_per_stage: \(2, 1\) adds"),
        (
            {
                "parallel": {"pipeline": 1, "schedule": "zero_bubble", "stages_per_rank": 1},
                "pretrain": {"batch_tokens": 1536},
            },
            2,
            r"^pretrain\.batch_tokens: 1536 must be a multiple of 1024",
        ),
        (
            {"parallel": {"tensor": 2}, "pretrain": {"async_updates": {"mode": "hogwild"}}},
            2,
            r"^pretrain\.async_updates\.mode: hogwild needs a whole model",
        ),
        ({}, 4, r"^sft\.batch_tokens: 2048 must be a multiple of 4096"),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
                "model": {"num_layers": 4},
                "pretrain": {"gradient_accumulation_steps": 5, "batch_tokens": 2560},
            },
            2,
            r"^pretrain\.gradient_accumulation_steps: 5 is not a multiple",
        ),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2, "zero_stage": 3},
                "model": {"num_layers": 4, "tie_embeddings": True},
            },
            2,
            r"^parallel\.stages_per_rank: zero_bubble with 2",
        ),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "zero_bubble"},
                "sft": {"activation_checkpointing": {"mode": "full"}},
            },
            2,
            r"^sft\.activation_checkpointing: is incompatible with parallel\.schedule zero_bubble",
        ),
        (
            {"parallel": {"context": 3}, "sft": {"gradient_accumulation_steps": 1}},
            3,
            r"^parallel\.context: rows of 512 tokens do not divide",
        ),
        (
            {"parallel": {"tensor": 2}, "pack": {"seq_len": 127}, "pretrain": {"batch_tokens": 127},
             "sft": {"batch_tokens": 254}},
            2,
            r"^parallel\.sequence_parallel: rows of 127 tokens",
        ),
        ({"sft": {"optimizer_cpu_offload": True}}, 1, r"^sft\.optimizer_cpu_offload: needs a GPU"),
        (
            {"pretrain": {"activation_checkpointing": {"offload": "host"}}},
            1,
            r"^pretrain\.activation_checkpointing\.offload: .* disable it",
        ),
    ],
)  # fmt: skip
def test_messages(changes: Mapping[str, Any], num_processes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(changes, num_processes)


@pytest.mark.parametrize(
    ("changes", "num_processes"),
    [
        ({}, 1),
        ({}, 2),
        ({"parallel": {"tensor": 2}}, 4),
        ({"parallel": {"context": 2, "pipeline": 2, "schedule": "zero_bubble"}}, 4),
    ],
)
def test_what_works_passes(changes: Mapping[str, Any], num_processes: int) -> None:
    check(changes, num_processes)


def test_only_stages_that_are_trained_count() -> None:
    config = parse_run(merge(dump(recipe("tiny")), {"parallel": {"tensor": 2}}))
    check_training(config, config.parallel, num_processes=1, stages=("clean", "evaluate", "report"))


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_nothing_is_written(inside: Command, tmp_path: Path, how: list[str]) -> None:
    run = tmp_path / "run"
    done = inside("run", "tiny", "--run-dir", str(run), "--pretrain.activation_checkpointing.offload", "host", *how)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pretrain.activation_checkpointing.offload: " in done.stderr
    assert not run.exists() or [path.name for path in run.iterdir()] == [".lock"]


def test_the_shape_is_that_of_the_folder(inside: Command, tmp_path: Path) -> None:
    from modelwright.model.decoder import Decoder
    from modelwright.model.hf import save_model

    shape = parse_run(merge(dump(recipe("tiny")), {"model": {"num_heads": 3, "num_kv_heads": 3, "ffn_dim": 96}})).model
    model = Decoder(shape)
    model.init_weights(0)
    save_model(model, tmp_path / "given")
    words = ("run", "tiny", "--init-from", str(tmp_path / "given"), "--nproc", "2", "--parallel.tensor", "2")
    done = inside(*words, "--run-dir", str(tmp_path / "run"))
    assert "parallel.tensor: 2 does not fit the model (model.num_heads: 3" in done.stderr


def test_the_context_is_that_of_the_folder(inside: Command, tmp_path: Path) -> None:
    """Rows may be longer than the context of the recipe's model, but not than that of the loaded model."""
    from modelwright.model.decoder import Decoder
    from modelwright.model.hf import save_model

    shape = parse_run(merge(dump(recipe("tiny")), {"model": {"max_seq_len": 1024}})).model
    model = Decoder(shape)
    model.init_weights(0)
    save_model(model, tmp_path / "given")
    words = ("run", "tiny", "--init-from", str(tmp_path / "given"), "--dry-run", "--run-dir", str(tmp_path / "run"))
    words = (*words, "--pretrain.batch_tokens", "4Ki", "--sft.batch_tokens", "4Ki")
    assert inside(*words, "--pack.seq_len", "1024").returncode == 0
    done = inside(*words, "--pack.seq_len", "2048")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pack.seq_len: 2048 is more than the model's context of " in done.stderr
    assert "given (1024); lower pack.seq_len" in done.stderr


@pytest.mark.slow
def test_a_finished_training_needs_no_processes(inside: Command, tmp_path: Path, small_words) -> None:
    """A run that was trained in two processes can be worked on with one."""
    run = tmp_path / "run"
    words = [*small_words, "--run-dir", str(run), "--stages", "clean,tokenize,pack,pretrain,report"]
    assert inside(*words).returncode == 0
    assert inside("run", str(run), "--parallel.tensor", "2").returncode == 0
    done = inside("run", str(run), "--parallel.tensor", "2", "--seed", "7")
    assert done.returncode == 2
    assert "parallel.data: " in done.stderr
