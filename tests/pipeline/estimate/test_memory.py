"""The memory model against the peaks of real steps, and against ZeRO's arithmetic."""

import sys
from dataclasses import replace

import pytest

from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.estimate.cost import RankPart, block_parameters, rank_memory, root_parameters
from modelwright.train.memory.activations import ActivationCheckpointingConfig, Segment, block_shape
from modelwright_claims import memory_probe
from modelwright_claims.activation_checkpointing import estimated_bytes, probe
from modelwright_plan.claims import zero_memory

TOLERANCE = 0.10
SLACK_BYTES = 6 * 2**20
"""What a process takes for itself in a run (gloo, libraries): it does not grow with the model."""
SHAPE = ModelConfig(
    vocab_size=1024, num_layers=4, model_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_dim=688,
    max_seq_len=256, tie_embeddings=False,
)  # fmt: skip
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to reset the peak of a process")


@pytest.mark.slow
@linux
def test_peaks_of_one_rank():
    """Nothing, every block and units of two computed again, selection; in processes of their own."""
    configs = {
        "none": ActivationCheckpointingConfig(),
        "unit": ActivationCheckpointingConfig(mode="full", layers_per_segment=2),
        "selective": ActivationCheckpointingConfig(mode="selective"),
    }
    probes = [replace(probe(SHAPE, 2, config, count_flops=False), num_steps=2) for config in configs.values()]
    found = memory_probe.measure_all(probes)
    for config, (measured,) in zip(configs.values(), found, strict=True):
        estimate = estimated_bytes(SHAPE, 2 * SHAPE.max_seq_len, config)
        assert estimate == pytest.approx(measured.peak_bytes, rel=TOLERANCE, abs=SLACK_BYTES), config.mode
        assert 12 * SHAPE.num_parameters == pytest.approx(measured.states_bytes, rel=TOLERANCE, abs=SLACK_BYTES)
    peaks = [measured.peak_bytes for (measured,) in found]
    assert peaks[1] < peaks[2] < peaks[0]


@pytest.mark.slow
@linux
def test_peaks_and_states_of_two_ranks():
    """Whole on each rank, and divided with FSDP2: two gloo processes."""
    stages = (0, 3)
    probes = [replace(zero_memory.probe(SHAPE, stage, 2), num_steps=2) for stage in stages]
    found = memory_probe.measure_all(probes, num_ranks=2)
    for stage, ranks in zip(stages, found, strict=True):
        for measured in ranks:
            estimate = zero_memory.estimated_bytes(SHAPE, stage, 2)
            assert estimate == pytest.approx(measured.peak_bytes, rel=TOLERANCE, abs=SLACK_BYTES), stage
            theory = zero_memory.theory_bytes(SHAPE.num_parameters, zero_memory.SHARDED[stage], 2)
            assert measured.states_bytes == pytest.approx(theory, rel=TOLERANCE, abs=SLACK_BYTES), stage


def part(**changes) -> RankPart:
    shape = block_shape(SHAPE, compute="fp32", mean_context=128)
    plain = RankPart(segments=(Segment(num_layers=1, recompute=False),) * 4, shape=shape, num_tokens=1024)
    return replace(plain, **changes)


def test_parameters_of_parts_add_up():
    whole = part()
    assert root_parameters(SHAPE, whole) + 4 * block_parameters(SHAPE, 1) == SHAPE.num_parameters
    norms = 2 * SHAPE.model_dim + 2 * SHAPE.head_dim
    assert 4 * (block_parameters(SHAPE, 4) - norms) == block_parameters(SHAPE, 1) - norms
    first, last = part(has_head=False), part(has_embedding=False)
    assert root_parameters(SHAPE, first) + root_parameters(SHAPE, last) == root_parameters(SHAPE, whole)
    tied = replace(SHAPE, tie_embeddings=True)
    assert root_parameters(tied, first) + root_parameters(tied, last) > root_parameters(tied, whole)


def test_states_are_divided_and_pipelines_hold_more_activations():
    whole, eighth = rank_memory(SHAPE, part()), rank_memory(SHAPE, part(zero_stage=3, sharing=8))
    assert whole.weights == 8 * eighth.weights
    assert whole.optimizer == 8 * eighth.optimizer
    assert whole.gathered == 0 < eighth.gathered
    one, four = (rank_memory(SHAPE, part(num_microbatches=8, in_flight=f, has_head=False)) for f in (1.0, 4.0))
    kept = 4 * 1024 * part().shape.whole_bytes
    assert four.total - one.total == pytest.approx(3 * kept)
    copies = rank_memory(SHAPE, part(copies=2, num_tokens=1))
    assert copies.transport == 4 * SHAPE.num_parameters


def test_layouts_of_the_config_reach_the_part():
    """Axes that the mesh would have are the ones that the planner divides by."""
    axes = ParallelConfig(data=4, zero_stage=3, shard_group_size=2, context=2).axes(8)
    assert axes == {"pipeline": 1, "replicate": 2, "shard": 2, "context": 2, "tensor": 1}
