"""Settings of a run: lengths, rows of a batch, errors with the way out."""

import pytest
import tiny_run
from wired_run import Notes

from modelwright.core.config import ConfigError, dump, parse
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.strategies.config import GradientSyncConfig
from modelwright.train.config import TrainConfig, without_effect
from modelwright.train.techniques.batch_selection import BatchSelectionConfig
from refusals import config_error


def test_length_in_steps_tokens_and_epochs():
    assert TrainConfig(num_steps=7).resolve_num_steps(100) == 7
    assert TrainConfig(num_tokens=10_000, batch_tokens=4096).resolve_num_steps(100) == 3
    assert TrainConfig(num_epochs=1.5).resolve_num_steps(100) == 150
    assert TrainConfig(num_epochs=0.001).resolve_num_steps(100) == 1
    assert TrainConfig().resolve_num_steps(100) == 100


@pytest.mark.parametrize("lengths", [{"num_steps": 5, "num_epochs": 1.0}, {"num_steps": -1}])
def test_at_most_one_length(lengths):
    with config_error("num_steps", match="at most one"):
        TrainConfig(**lengths)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("adam_eps", 0.0),
        ("betas", (0.9, 1.0)),
        ("keep_last", 0),
        ("max_grad_norm", -1.0),
        ("gradient_accumulation_steps", 0),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        TrainConfig(num_steps=1, **{field: value})


def test_rows_of_a_batch():
    config = TrainConfig(num_steps=1, batch_tokens=8192, gradient_accumulation_steps=4)
    assert config.batch_rows(512, num_copies=2) == 16
    with config_error("batch_tokens", match="multiple of 12288"):
        config.batch_rows(1024, num_copies=3)


def test_identity_leaves_out_what_does_not_decide_the_weights():
    base = TrainConfig(num_steps=9)
    same = TrainConfig(num_steps=9, gradient_accumulation_steps=4, keep_last=7, checkpoint_every_minutes=1.0)
    assert base.identity() == same.identity()
    assert base.identity() != TrainConfig(num_steps=9, learning_rate=1.0).identity()
    assert base.identity() == TrainConfig(num_steps=9, gradient_sync=GradientSyncConfig(overlap=False)).identity()
    assert base.identity() != TrainConfig(num_steps=9, gradient_sync=GradientSyncConfig(kind="int8")).identity()


def test_parts_that_share_chosen_rows_decide_the_weights():
    chosen = BatchSelectionConfig(signal="loss")
    one, two = (TrainConfig(num_steps=9, gradient_accumulation_steps=parts, batch_selection=chosen) for parts in (1, 2))
    assert one.identity() != two.identity()


def test_round_trip_through_plain_data():
    config = TrainConfig(num_tokens=5, betas=(0.8, 0.9))
    assert parse(TrainConfig, dump(config)) == config


EVERYTHING_UNUSED = {
    "num_steps": 1,
    "gradient_sync": {"kind": "int8"},
    "optimizer_cpu_offload": True,
    "load_balance": {"pipeline": True},
    "precision": {"policy": "fp32", "fp32_matmul": "tf32"},
    "sparse_updates": {"keep_fraction": 0.3},
}


def test_what_has_no_effect_is_said_with_what_it_needs():
    config = parse(TrainConfig, EVERYTHING_UNUSED)
    found = without_effect(config, ParallelConfig(), num_processes=1, on_accelerator=False)
    assert sorted(found) == [
        "gradient_sync.kind int8 (needs several replicas whose gradients are summed)",
        "load_balance.pipeline true (needs a pipeline)",
        "optimizer_cpu_offload (needs an accelerator)",
        "precision.fp32_matmul tf32 (needs an accelerator)",
        "sparse_updates.keep_fraction (needs kind columns or rows or layers or freeze_prefix)",
    ]


@pytest.mark.parametrize(
    ("layout", "num_processes", "has_replicas"),
    [
        ({}, 2, True),
        ({"context": 2}, 2, True),
        ({"tensor": 2}, 2, False),
        ({"pipeline": 2}, 2, False),
        ({"zero_stage": 1}, 2, False),
        ({"zero_stage": 3, "shard_group_size": 2}, 4, True),
    ],
)
def test_compression_has_an_effect_where_several_replicas_sum_gradients(layout, num_processes, has_replicas):
    config = parse(TrainConfig, {"num_steps": 1, "gradient_sync": {"kind": "int8"}})
    parallel = parse(ParallelConfig, layout)
    found = without_effect(config, parallel, num_processes=num_processes, on_accelerator=False)
    assert found == (
        [] if has_replicas else ["gradient_sync.kind int8 (needs several replicas whose gradients are summed)"]
    )


def test_a_run_notes_what_has_no_effect_once(tmp_path):
    notes = Notes()
    config = tiny_run.settings(num_steps=1, gradient_sync={"kind": "int8"})
    tiny_run.run(tmp_path, config, progress=notes)
    assert [text for text in notes.texts if "without effect" in text] == [
        "without effect in this run: gradient_sync.kind int8 (needs several replicas whose gradients are summed)"
    ]
