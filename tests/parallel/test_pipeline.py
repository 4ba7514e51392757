"""Every schedule, on two and four real processes, is one and the same training as a single process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed import OnDemand, run_distributed
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.runner import unsplit_backward_refused
from modelwright.parallel.pipeline.stages import (
    check_blocks,
    check_microbatches,
    check_ties,
    cut,
    join,
    layers_of_stages,
    rank_of_stage,
)
from modelwright.train.checkpoint.files import read_weights
from modelwright.train.memory.activations import Segment
from modelwright.train.memory.checkpointing import checkpoint_segments
from modelwright.train.parallelize import compile_each_block
from parallel import pipeline_run
from parallel.pipeline_run import Case
from refusals import config_error
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-11, "atol": 1e-13}

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
TWO = [
    Case(schedule=schedule, stages_per_rank=stages, num_microbatches=number, tied=number == 1)
    for schedule, stages in SCHEDULES
    for number in (1, 4)
]
MIXED = [
    Case(recompute=True, tied=True),
    Case(schedule="interleaved", stages_per_rank=2, num_microbatches=2, recompute=True),
]
RAGGED = [
    Case(num_microbatches=3),
    Case(num_microbatches=3, schedule="zero_bubble", stages_per_rank=2, tied=True),
    Case(num_microbatches=4, rows="8+3+5"),
]
RAGGED_COPIES = [
    Case(data=2, num_microbatches=2, rows="8+5+3"),
    Case(data=2, num_microbatches=2, rows="5", zero_stage=3, schedule="interleaved", stages_per_rank=2),
]
"""Microbatches of unequal numbers of rows, batches with fewer rows than microbatches, copies with unequal shares."""
MOVED = [replace(MIXED[0], layers="3+1"), replace(Case(), layers="1+3")]
FP32 = [Case(exact=False, tied=True), Case(schedule="zero_bubble", stages_per_rank=2, exact=False, tied=True)]
FOUR = [
    case
    for schedule, stages in SCHEDULES
    for case in (
        Case(schedule=schedule, stages_per_rank=stages, pipeline=4, tied=True),
        Case(schedule=schedule, stages_per_rank=stages, data=2, num_microbatches=2, zero_stage=3, tied=stages == 1),
    )
]
FOUR += [
    Case(data=2, num_microbatches=2),
    Case(schedule="zero_bubble", stages_per_rank=2, data=2, num_microbatches=2, tied=True),
    Case(tensor=2, num_microbatches=2, tied=True),
    Case(tensor=2, num_microbatches=2, schedule="zero_bubble"),
    Case(context=2, num_microbatches=2, schedule="interleaved", stages_per_rank=2),
]


GROUPS = [
    TWO[:5],
    [*TWO[5:], *FP32],
    [*MIXED, Case(), *MOVED],
    RAGGED,
    *(FOUR[n : n + 4] for n in range(0, len(FOUR), 4)),
    RAGGED_COPIES,
]
"""Cases that run on one process group; those that move layers after the ones whose checkpoints they take."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> OnDemand[Case, Path]:
    """The folder of a group's runs, and of what one process makes of each case."""
    torch.set_num_threads(1)

    def run(group: Sequence[Case]) -> Path:
        folder = tmp_path_factory.mktemp("pipeline")
        run_distributed(pipeline_run.run_cases, group[0].num_ranks, folder, group)
        for single, case in {case.single: case for case in group}.items():
            pipeline_run.run_case(case, folder / single)
        return folder

    return OnDemand(GROUPS, run)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO + FOUR + MIXED + FP32, ids=lambda case: case.name)
def test_losses_and_weights_equal_those_of_one_process(runs, case):
    check_against_one_process(runs, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", RAGGED + RAGGED_COPIES, ids=lambda case: case.name)
def test_ragged_microbatches_train_like_one_process(runs, case):
    check_against_one_process(runs, case)


def check_against_one_process(runs, case):
    single, ranks = runs[case] / case.single, runs[case] / case.name
    for metric in ("loss", "heldout_loss", "grad_norm", "num_tokens"):
        of_one, of_ranks = (
            torch.tensor(column(read_records(path / "metrics.jsonl"), metric), dtype=torch.float64)
            for path in (single, ranks)
        )
        torch.testing.assert_close(of_ranks, of_one, **(EXACT if case.exact else TOLERANCES["fp32_loss"]))
    weights = load_file(single / "rank0.safetensors")
    for rank in range(case.num_ranks):
        for name, weight in load_file(ranks / f"rank{rank}.safetensors").items():
            torch.testing.assert_close(weight, weights[name], **(EXACT if case.exact else TOLERANCES["fp32_trained"]))


@pytest.mark.slow
@pytest.mark.parametrize("case", MOVED, ids=lambda case: case.name)
def test_layers_move_at_a_checkpoint(runs, case):
    moved, stayed = (
        column(read_records(runs[case] / c.name / "metrics.jsonl"), "loss") for c in (case, replace(case, layers=""))
    )
    assert [step for step, _ in moved] == [3]
    assert moved[0][1] == pytest.approx(stayed[2][1], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(), FOUR[3], FOUR[-2]], ids=lambda case: case.name)
def test_checkpoint_holds_the_whole_model(runs, case):
    whole = load_file(runs[case] / case.single / "rank0.safetensors")
    saved = read_weights(runs[case] / case.name / "checkpoints", pipeline_run.STEPS)
    assert saved.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(saved[name], weight, **EXACT)


def test_training_changed_the_weights(runs):
    before = pipeline_run.tiny_model(tied=False, num_layers=Case().num_layers)
    after = load_file(runs[Case()] / Case().single / "rank0.safetensors")
    assert all(not torch.equal(weight.double(), after[name]) for name, weight in before.state_dict().items())


def model(num_layers: int = 4, *, tied: bool = False) -> Decoder:
    shape = ModelConfig(
        vocab_size=32, num_layers=num_layers, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8,
        max_seq_len=16, tie_embeddings=tied,
    )  # fmt: skip
    return Decoder(shape)


def test_parts_hold_every_weight_once_under_its_name():
    whole = model(5)
    parts = [cut(whole, range(2), is_first=True, is_last=False), cut(whole, range(2, 5), is_first=False, is_last=True)]
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(whole.state_dict())
    assert list(join(parts).state_dict()) == list(whole.state_dict())


def test_tied_embedding_is_in_the_first_part_and_the_last():
    whole = model(4, tied=True)
    parts = [cut(whole, range(i, i + 1), is_first=i == 0, is_last=i == 3) for i in range(4)]
    assert ["embedding.weight" in part.state_dict() for part in parts] == [True, False, False, True]


def test_blocks_that_do_not_come_apart_are_refused_under_zero_bubble():
    config = ParallelConfig(pipeline=2, schedule="zero_bubble")
    check_blocks(model(), config)
    check_blocks(checkpoint_segments(model(), [Segment(num_layers=1, recompute=True)] * 4), ParallelConfig(pipeline=2))
    for refused in (
        checkpoint_segments(model(), [Segment(num_layers=1, recompute=True)] * 4),
        compile_each_block(model(), backend="eager"),
    ):
        with config_error("schedule", match=r"^schedule: zero_bubble"):
            check_blocks(refused, config)


def test_stages_go_round_or_down_and_up():
    assert rank_of_stage(ParallelConfig(pipeline=3)) == [0, 1, 2]
    assert rank_of_stage(ParallelConfig(pipeline=2, schedule="interleaved", stages_per_rank=3)) == [0, 1, 0, 1, 0, 1]
    assert rank_of_stage(ParallelConfig(pipeline=3, schedule="zero_bubble", stages_per_rank=2)) == [0, 1, 2, 2, 1, 0]


def test_given_split_is_taken_and_checked():
    config = ParallelConfig(pipeline=3, layers_per_stage=(1, 3, 0))
    assert layers_of_stages(model(4).config, config) == [range(1), range(1, 4), range(4, 4)]
    with config_error("layers_per_stage", match=r"^layers_per_stage: .* adds up to 4, but the model has 5 layers"):
        layers_of_stages(model(5).config, config)
    with config_error("layers_per_stage", match=r"^layers_per_stage: only the first and the last"):
        layers_of_stages(model(4).config, ParallelConfig(pipeline=3, layers_per_stage=(1, 0, 3)))


def test_too_few_layers_are_refused():
    with config_error("pipeline"):
        layers_of_stages(model(3).config, ParallelConfig(pipeline=4))


def test_microbatches_that_no_round_holds_are_refused():
    config = ParallelConfig(pipeline=2, schedule="interleaved", stages_per_rank=2)
    for number in (1, 2, 3, 4, 6, 8):
        check_microbatches(config, number)
    with config_error("gradient_accumulation_steps", match=r"^gradient_accumulation_steps: 5 is not .* use 4 or 6"):
        check_microbatches(config, 5)
    check_microbatches(ParallelConfig(pipeline=2, schedule="zero_bubble", stages_per_rank=2), 5)


def test_tied_weights_in_two_sharded_stages_of_one_rank_are_refused():
    config = ParallelConfig(pipeline=2, schedule="zero_bubble", stages_per_rank=2, zero_stage=3)
    check_ties(model().config, config)
    with config_error("stages_per_rank"):
        check_ties(model(tied=True).config, config)


def test_a_backward_pass_that_pytorch_cannot_split_is_refused_by_name() -> None:
    with (
        config_error("parallel.schedule"),
        unsplit_backward_refused("zero_bubble"),
    ):
        raise RuntimeError("Attribute '_input_metadata' is invalid for this instance")
    with pytest.raises(RuntimeError, match="another"), unsplit_backward_refused("zero_bubble"):
        raise RuntimeError("another")
