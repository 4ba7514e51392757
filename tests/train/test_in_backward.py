"""Weights updated in backward: the bits of the ordinary way, clipping by the last norm, stops, values not finite."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from modelwright.core.config import ConfigError, ModelwrightError, Stopped
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.strategy import total_norm
from modelwright.train.objective import Objective, Terms, forward
from modelwright.train.optim.build import build_optimizer

pytestmark = pytest.mark.slow

UNCLIPPED = {"max_grad_norm": 0.0, "eval_every_steps": 0}
BY_LAST_NORM = {"optimizer_in_backward": True, "max_grad_norm": 0.5, "eval_every_steps": 0}
CASES = {
    "adamw": {},
    "microbatches": {"gradient_accumulation_steps": 2},
    "recomputed": {"activation_checkpointing": {"mode": "full", "layers_per_segment": 2}},
    "int8": {"optimizer": "adamw_8bit"},
    "bf16": {"optimizer": "adamw_bf16_states"},
    "lion": {"optimizer": "lion"},
}


@dataclass
class Spoiled(Objective):
    """The tiny objective, with something done to the losses of one batch, the first time that it comes or each time."""

    inner: NextToken
    batch: int
    spoil: Callable[[Tensor], Tensor]
    once: bool = False
    number: int = -1

    def batches(self, model, *, first: int, rank: int, world_size: int) -> Iterator:
        found = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for self.number, batch in enumerate(found, start=first):
            yield batch

    def weights(self, batch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output, batch, model) -> Terms:
        terms = self.inner.losses(output, batch, model)
        if self.number != self.batch:
            return terms
        self.batch = -1 if self.once else self.batch
        return Terms({name: self.spoil(value) for name, value in terms.losses.items()})


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_same_weights_to_the_last_bit(tiny, tmp_path, case):
    for name, more in (("after", {}), ("within", {"optimizer_in_backward": True})):
        tiny.run(tmp_path / name, tiny.settings(**UNCLIPPED, **CASES[case], **more), heldout=[])
    after, within = (tiny.final_weights(tmp_path / name) for name in ("after", "within"))
    assert equal(after, within)
    losses, norms = (
        [column(read_records(tmp_path / name / "metrics.jsonl"), metric) for name in ("after", "within")]
        for metric in ("loss", "grad_norm")
    )
    assert losses[0] == losses[1]
    assert [norm for _, norm in norms[1]] == pytest.approx([norm for _, norm in norms[0]], rel=1e-5)


@pytest.mark.parametrize("more", [{"optimizer_in_backward": True, "max_grad_norm": 0.0}, BY_LAST_NORM])
def test_a_stopped_run_goes_on_with_the_same_bits(tiny, tmp_path, more):
    config = tiny.settings(**{"eval_every_steps": 0, **more})
    tiny.run(tmp_path / "once", config, heldout=[])
    with pytest.raises(Stopped):
        tiny.run(tmp_path / "twice", config, heldout=[], techniques=tiny.watching(stop=tiny.StopAfter(7)))
    tiny.run(tmp_path / "twice", config, heldout=[])
    assert equal(tiny.final_weights(tmp_path / "once"), tiny.final_weights(tmp_path / "twice"))


def test_either_way_goes_on_from_the_others_checkpoint(tiny, tmp_path):
    after, within = tiny.settings(**UNCLIPPED), tiny.settings(**UNCLIPPED, optimizer_in_backward=True)
    tiny.run(tmp_path / "once", after, heldout=[])
    with pytest.raises(Stopped):
        tiny.run(tmp_path / "twice", within, heldout=[], techniques=tiny.watching(stop=tiny.StopAfter(7)))
    tiny.run(tmp_path / "twice", after, heldout=[])
    assert equal(tiny.final_weights(tmp_path / "once"), tiny.final_weights(tmp_path / "twice"))
    assert after.identity() == within.identity()
    assert after.identity() != tiny.settings(**BY_LAST_NORM).identity()


def test_clipping_by_the_last_norm_against_its_definition(tiny, tmp_path):
    config = tiny.settings(**BY_LAST_NORM, num_steps=5, schedule={"kind": "constant", "warmup_fraction": 0.0})
    model, twin = tiny.tiny_model(), tiny.tiny_model()
    tiny.run(tmp_path, config, model=model, heldout=[])

    optimizer = build_optimizer(twin, learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    objective, last_norm, num_clipped = NextToken(tiny.Rows()), 0.0, 0
    for number in range(5):
        batch = tiny.Rows().batch(number)
        loss = objective.losses(forward(twin, batch), batch, twin).losses["loss"] / objective.weights(batch)["loss"]
        loss.backward()
        gradients = [p.grad for p in twin.parameters()]
        norm, factor = float(total_norm(gradients)), min(1.0, 0.5 / (last_norm + 1e-6)) if last_norm else 1.0
        for gradient in gradients:
            gradient.mul_(factor)
        last_norm, num_clipped = norm, num_clipped + (factor < 1)
        optimizer.step()
        optimizer.zero_grad()
    assert num_clipped == 4
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_is_skipped_as_in_the_ordinary_way(tiny, tmp_path):
    for name, more in (("after", {}), ("within", {"optimizer_in_backward": True})):
        spoiled = Spoiled(NextToken(tiny.Rows()), 5, lambda loss: loss * torch.nan)
        result = tiny.run(tmp_path / name, tiny.settings(**UNCLIPPED, **more), objective=spoiled, heldout=[])
        assert result.summary_of("finite_check")["num_skipped"] == 1
    assert equal(tiny.final_weights(tmp_path / "after"), tiny.final_weights(tmp_path / "within"))


def test_a_step_that_ran_out_of_memory_before_any_weight_changed_is_made_again(tiny, tmp_path):
    def no_memory(loss: Tensor) -> Tensor:
        return tiny.flows_back(loss, lambda gradient: torch.empty(2**60))  # far more than any machine has

    for name, more in (("after", {}), ("within", {"optimizer_in_backward": True})):
        spoiled = Spoiled(NextToken(tiny.Rows()), 5, no_memory, once=True)
        result = tiny.run(tmp_path / name, tiny.settings(**UNCLIPPED, **more), objective=spoiled, heldout=[])
        assert (name, result.summary_of("finite_check")["num_skipped"]) == (name, 0)
    assert equal(tiny.final_weights(tmp_path / "after"), tiny.final_weights(tmp_path / "within"))


def test_a_gradient_that_is_not_finite_ends_the_run(tiny, tmp_path):
    overflow = partial(tiny.flows_back, change=lambda gradient: gradient * torch.inf)
    spoiled = Spoiled(NextToken(tiny.Rows()), 5, overflow)
    config = tiny.settings(**UNCLIPPED, optimizer_in_backward=True)
    with pytest.raises(ModelwrightError, match="was not finite after other weights had been updated"):
        tiny.run(tmp_path, config, objective=spoiled, heldout=[])


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("optimizer", {**BY_LAST_NORM, "optimizer": "muon"}),
        (
            "weight_decay_schedule.grad_norm_threshold",
            {**BY_LAST_NORM, "weight_decay_schedule": {"grad_norm_threshold": 5.0}},
        ),
        ("gradient_sync.kind", {**BY_LAST_NORM, "gradient_sync": {"kind": "int8"}}),
        ("precision.loss_scale", {**BY_LAST_NORM, "precision": {"policy": "fp16_mixed"}}),
    ],
)
def test_what_needs_the_whole_gradient_is_refused(tiny, field, more):
    with pytest.raises(ConfigError, match=f"{field}: "):
        tiny.settings(**more)


@pytest.mark.parametrize("mode", ["none", "unclipped", "clip_by_last_norm"])
def test_a_batch_without_a_label_moves_no_weight(tiny, tmp_path, mode):
    """Momentum would carry them on, and decay would hold."""

    class Unlabeled(tiny.Rows):
        def batch(self, index, *, rank=0, world_size=1):
            found = super().batch(index, rank=rank, world_size=world_size)
            return replace(found, labels_BT=torch.full_like(found.labels_BT, IGNORED)) if index >= 2 else found

    ends = []
    for num_steps in (2, 3):
        settings = {"num_steps": num_steps, "weight_decay": 0.5, "eval_every_steps": 0}
        settings["optimizer_in_backward"] = mode != "none"
        settings |= {"max_grad_norm": 0.0 if mode != "clip_by_last_norm" else 0.5, "schedule": {"kind": "constant"}}
        model, folder = tiny.tiny_model(), tmp_path / str(num_steps)
        tiny.run(folder, tiny.settings(**settings), model=model, objective=NextToken(Unlabeled()), heldout=[])
        ends.append(model.state_dict())
    assert equal(*ends)
    records = read_records(next(folder.rglob("metrics.jsonl")))
    assert [record["skipped"] for record in records if "skipped" in record] == [False, False, True]
