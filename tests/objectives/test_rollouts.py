"""Rollouts: the same completions under every layout, with the log-probabilities that training computes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

import tiny_rollouts
from distributed import run_distributed
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ModelwrightError
from modelwright.data.document import Document
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.examples import PromptRecord, read_prompts, write_prompts
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.adapters import adapters_of, attach_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import AdapterConfig, BaseFormat
from modelwright.objectives.experience import RowPlan, completion_batch
from modelwright.objectives.rollouts import Rollout, RolloutWorker, gather_rows, rollout_metrics, share, shown
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, single
from modelwright.reward.build import Term, WeightedSum
from modelwright.train.objective import Executor, ModelLayout
from modelwright.train.parallelize import parallelize
from modelwright.train.precision.policy import PrecisionConfig

FP32 = PrecisionConfig(policy="fp32")


def adapted(base_format: BaseFormat = "full") -> Decoder:
    """A model whose adapters change what it generates."""
    model, draw = tiny_rollouts.model(), torch.Generator().manual_seed(2)
    attach_adapters(model, AdapterConfig(r=2, base_format=base_format), seed=1)
    for adapter in adapters_of(model).values():
        adapter.lora_B.data.normal_(std=0.5, generator=draw)
    return model


def laid_out(world: World, make: Callable[[], Decoder], **axes: Any) -> tuple[Executor, ModelLayout]:
    parallel = ParallelConfig(**axes)
    mesh = build_mesh(world, parallel)
    executor = parallelize(
        make(), mesh=mesh, parallel=parallel, activations=lambda part: part, compile_blocks=False,
        precision=FP32,
    )  # fmt: skip
    return executor, ModelLayout(mesh=mesh, precision=FP32)


def roll_out(
    world: World,
    worker: RolloutWorker | None = None,
    *,
    make: Callable[[], Decoder] = tiny_rollouts.model,
    num_generations: int = 2,
    **axes: Any,
) -> tuple[Rollout, Tensor]:
    """A rollout, and the log-probabilities [C, T] that training computes of it; zeros where this rank has none."""
    torch.set_num_threads(1)
    executor, layout = laid_out(world, make, **axes)
    worker = worker or tiny_rollouts.worker()
    numbers = range(len(worker.prompts))
    with layout.whole_model(executor.model) as whole:
        rollout = worker.roll_out(whole, world, numbers, num_generations=num_generations, stream=("test", 0))
    plan = RowPlan.of(rollout.lens_C - 1, 48)
    found_CT = torch.zeros_like(rollout.log_probs_CT)

    def keep(output: Tensor, part: Any) -> Tensor:
        log_probs_BT = executor.model.token_log_probs(output, part.labels_BT)
        found_CT.copy_(plan.taken(log_probs_BT, found_CT.shape[1]))
        return log_probs_BT.sum()

    with torch.no_grad():
        executor.evaluate([completion_batch(rollout.ids_CL, rollout.mask_CT, plan)], keep)
    return rollout, found_CT


def test_a_stop_of_the_generation_config_ends_a_rollout(tmp_path: Path) -> None:
    """The third kind of stop, next to those of the tokenizer and of the template."""
    usual, _ = roll_out(single())
    begin = int(usual.prompt_lens_C[0])
    place = next(n for n in range(begin + 2, begin + 9) if usual.ids_CL[0, n] not in usual.ids_CL[0, begin:n])
    tiny_rollouts.tokenizer().save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(usual.ids_CL[0, place])]}))
    ended, _ = roll_out(single(), replace(tiny_rollouts.worker(), tokenizer=Tokenizer.load(tmp_path)))
    assert int(usual.completion_lens_C[0]) > int(ended.completion_lens_C[0]) == place - begin + 1
    assert torch.equal(ended.ids_CL[0, : place + 1], usual.ids_CL[0, : place + 1])


def in_all_layouts(world: World, make: Callable[[], Decoder]) -> dict[str, tuple[Rollout, Tensor]]:
    layouts = tiny_run.TWO_RANK_LAYOUTS.items()
    # Tensor parallelism cuts no run of 64 packed weights, and rows are shorter here.
    is_packed = make().adapters.base_format != "full"
    return {name: roll_out(world, make=make, **axes) for name, axes in layouts if not (is_packed and name == "tensor")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [tiny_rollouts.model, adapted, partial(adapted, "int8")],
    ids=["plain", "with adapters", "with a packed base"],
)
def test_every_layout_generates_what_one_process_does(make: Callable[[], Decoder]) -> None:
    expected, own_CT = roll_out(single(), make=make)
    if make is not tiny_rollouts.model:
        assert not torch.equal(expected.ids_CL, roll_out(single())[0].ids_CL)
    assert expected.num_completions == 8
    assert len(expected.ids_CL.unique(dim=0)) == 8
    assert (expected.completion_lens_C <= tiny_rollouts.MAX_NEW).all()
    torch.testing.assert_close(own_CT, expected.log_probs_CT, rtol=0, atol=1e-4)
    for rank, found in enumerate(run_distributed(in_all_layouts, 2, make)):
        for name, (rollout, log_probs_CT) in found.items():
            for key, values in rollout.state_dict().items():
                atol = 1e-5 if key == "log_probs_CT" else 0.0
                torch.testing.assert_close(values, getattr(expected, key), rtol=0, atol=atol, equal_nan=True)
            if (name, rank) != ("pipeline", 0):  # which has no output
                torch.testing.assert_close(log_probs_CT, rollout.log_probs_CT, rtol=0, atol=1e-4)


def test_two_rollouts_draw_different_tokens_and_one_repeats() -> None:
    worker, model = tiny_rollouts.worker(), tiny_rollouts.model()

    def ids(number: int) -> Tensor:
        return worker.roll_out(model, single(), [0], num_generations=4, stream=("test", number)).ids_CL

    assert torch.equal(ids(1), ids(1))
    assert not torch.equal(ids(1), ids(2))


@pytest.mark.parametrize("row_len", [24, 64])
def test_rows_give_back_what_was_placed_in_them(row_len: int) -> None:
    draw = torch.Generator().manual_seed(1)
    lengths_C = torch.randint(1, 24, (9,), generator=draw)
    values_CT = torch.rand(9, 24, generator=draw) * (torch.arange(24) < lengths_C[:, None])
    plan = RowPlan.of(lengths_C, row_len)
    placed_BR = plan.placed(values_CT)
    assert torch.equal(plan.taken(placed_BR, 24), values_CT)
    assert int((placed_BR != 0).sum()) == int(lengths_C.sum())
    assert plan.num_rows < 9 or row_len == 24


def test_a_batch_predicts_the_tokens_of_completions_alone() -> None:
    ids_CL = torch.arange(1, 13).view(2, 6)
    mask_CT = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    batch = completion_batch(ids_CL, mask_CT, RowPlan.of(torch.tensor([3, 5]), 9), {"x": torch.rand(2, 5)})
    assert batch.labels_BT.tolist() == [[IGNORED, 3, 4, IGNORED, IGNORED, 10, 11, 12, IGNORED]]
    assert batch.segments_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, -1]]
    assert batch.positions_BT[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.extras["x_BT"].shape == (1, 9)


def test_failed_rewards_are_counted_and_have_no_value() -> None:
    rollout, _ = roll_out(single(), tiny_rollouts.worker(fault=2))
    num_failed = int((~rollout.scored_C).sum())
    assert 0 < num_failed < rollout.num_completions
    assert torch.equal(rollout.scored_C, rollout.terms_CR[:, 0].isfinite())
    metrics = rollout_metrics(rollout, ["even"])
    assert metrics["reward/failures"] == metrics["rewards/even/failures"] == num_failed
    assert metrics["reward"] == float(rollout.rewards_C[rollout.scored_C].mean())


def test_a_reward_that_always_fails_ends_the_training() -> None:
    worker = tiny_rollouts.worker()
    (term,) = worker.reward.terms

    class Broken:
        name = "broken"

        def score(self, samples: object) -> list[object]:
            raise AttributeError("no such attribute")

    broken = replace(worker, reward=WeightedSum([term, Term(Broken(), 0.5)]))
    with pytest.raises(ModelwrightError, match="reward broken: none of 8 answers has a score"):
        roll_out(single(), broken)
    watched = replace(worker, reward=WeightedSum([term, Term(Broken(), 0.0)]))
    assert roll_out(single(), watched)[0].scored_C.all(), "a reward without weight is only recorded"


def test_rollouts_of_different_widths_are_joined() -> None:
    rollout, _ = roll_out(single())
    parts = [rollout.take(torch.arange(3)), rollout.take(torch.arange(3, 8))]
    narrow = replace(parts[0], ids_CL=parts[0].ids_CL[:, :20], log_probs_CT=parts[0].log_probs_CT[:, :19])
    joined = Rollout.joined([narrow, parts[1]])
    assert joined.ids_CL.shape == rollout.ids_CL.shape
    assert torch.equal(joined.ids_CL[3:], rollout.ids_CL[3:])
    assert torch.equal(joined.ids_CL[:3, :20], rollout.ids_CL[:3, :20])
    assert [one["prompt"] for one in shown(joined, tiny_rollouts.worker(), 2)] == ["a", "aa"]


def test_shares_of_few_things_leave_ranks_without_any() -> None:
    worlds = [World(rank=rank, size=3, device=torch.device("cpu")) for rank in range(3)]
    assert [list(share(5, world)) for world in worlds] == [[0, 1], [2, 3], [4]]
    assert [list(share(1, world)) for world in worlds] == [[0], [], []]
    assert torch.equal(gather_rows(single(), torch.zeros(0, 4)), torch.zeros(0, 4))


def test_prompts_keep_the_reference_answer_and_the_records_fields(tmp_path: Any) -> None:
    meta = {"question": "1 + 1?", "answer": "2", "tests": ["assert 1"], "id": 7}
    document = Document(id="x", text="1 + 1?\n\n2", kind="qa", split="train", source="s", meta=meta)
    prompt = PromptRecord.of(document, tiny_rollouts.tokenizer())
    assert prompt.fields == {"answer": "2", "tests": ["assert 1"], "id": 7}
    assert prompt.messages == [{"role": "user", "content": "1 + 1?"}]
    write_prompts(tmp_path, [prompt])
    (found,) = read_prompts(tmp_path)
    assert (list(found.ids), found.fields) == (list(prompt.ids), prompt.fields)
    with pytest.raises(ArtifactError, match=r"prompts\.jsonl: is missing"):
        read_prompts(tmp_path / "none")
