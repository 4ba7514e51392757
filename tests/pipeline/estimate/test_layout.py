"""Traffic and memory of a layout, and the microbatches that a pipeline rank holds."""

from types import SimpleNamespace

from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.stages import microbatches_in_flight
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, expected_traffic
from modelwright.train.memory.activations import ActivationCheckpointingConfig

MODEL = ModelConfig(
    vocab_size=32_000, num_layers=16, model_dim=2048, num_heads=16, num_kv_heads=8, head_dim=128, ffn_dim=5632,
    max_seq_len=2048,
)  # fmt: skip
JOB = TrainingJob(model=MODEL, seq_len=2048, batch_tokens=64 * 2048)


def test_tensor_parallelism_talks_more_often_than_a_pipeline():
    parallel = ParallelConfig(pipeline=2, tensor=2)
    layout = Layout(parallel=parallel, num_devices=8, microbatch_rows=2, activations=ActivationCheckpointingConfig())
    found = expected_traffic(JOB, layout)
    assert list(found) == ["pipeline", "replicate", "tensor"]
    assert found["tensor"].num_messages > 10 * found["pipeline"].num_messages
    assert found["pipeline"].num_bytes == 2 * 2048 * MODEL.model_dim * 2 / 2  # rows x tokens x width x BF16 / tensor


def test_microbatches_in_flight_follow_pytorch_s_order_of_work():
    """Counted from PyTorch's own lists of actions."""
    from torch.distributed.pipelining import schedules as torch_schedules

    pipeline, count = 4, 8
    cases = (
        ("interleaved", 2, torch_schedules.ScheduleInterleaved1F1B),
        ("interleaved", 4, torch_schedules.ScheduleInterleaved1F1B),
        ("zero_bubble", 1, torch_schedules.ScheduleInterleavedZeroBubble),
        ("zero_bubble", 2, torch_schedules.ScheduleZBVZeroBubble),
    )
    for schedule, stages, kind in cases:
        for rank in range(pipeline):
            facts = SimpleNamespace(
                n_local_stages=stages,
                pp_group_size=pipeline,
                num_stages=stages * pipeline,
                _n_microbatches=count,
                microbatches_per_round=count // max(1, count // pipeline),
            )
            held = most = 0
            for action in filter(None, kind._calculate_single_rank_operations(facts, rank)):
                done = action.computation_type.name
                held += (done == "FORWARD") - (done in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
                most = max(most, held)
            found = microbatches_in_flight(
                schedule, pipeline=pipeline, rank=rank, stages_per_rank=stages, num_microbatches=count
            )
            assert found * stages == most, (schedule, stages, rank)


def test_microbatches_in_flight_of_plain_pipelines():
    def held(schedule, rank, count):
        return microbatches_in_flight(schedule, pipeline=4, rank=rank, stages_per_rank=1, num_microbatches=count)

    assert [held("gpipe", rank, 8) for rank in range(4)] == [8, 8, 8, 8]
    assert [held("1f1b", rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert held("1f1b", 0, 2) == 2
