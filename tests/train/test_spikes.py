"""Spikes are left out, several of them send the run back; through the update, and through THE loop."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from modelwright.core.config import ConfigError, Stopped
from modelwright.core.records import column, read_records
from modelwright.objectives.next_token import NextToken
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import LOSS_SPIKE, NOT_FINITE, Update
from modelwright.train.techniques.loss_spikes import LossSpikeConfig, LossSpikes
from refusals import config_error

LEVEL = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]


def spikes(tmp_path, **config) -> LossSpikes:
    settings = LossSpikeConfig(**{"num_sigmas": 6.0, "window_steps": 6, **config})
    path = tmp_path / "loss_spikes.jsonl"
    return LossSpikes(settings, lambda flag: flag, path, is_first=True, checkpoint_every=2)


def feed(guard: LossSpikes, losses, *, first: int = 0, norms=None) -> list[bool]:
    skipped = []
    for step, loss in enumerate(losses, start=first):
        norm = norms[step - first] if norms else 1.0
        update = Update(
            step=step, num_steps=99, gradients=[], losses={"loss": loss}, weights={"loss": 1.0}, grad_norm=norm
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            update.skip(NOT_FINITE)
        guard.on_gradients(update)
        skipped.append(update.skip_reason == LOSS_SPIKE)
    return skipped


def test_a_jump_of_loss_or_norm_is_left_out_and_recorded(tmp_path):
    guard = spikes(tmp_path)
    assert feed(guard, [*LEVEL, 3.0, 1.0]) == [False] * 6 + [True, False]
    assert feed(guard, [1.0, 1.0], first=8, norms=[9.0, 1.1]) == [True, False]
    lines = [json.loads(line) for line in (tmp_path / "loss_spikes.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["batches"], line["loss"]) for line in lines] == [
        ("spike", [6, 6], 3.0), ("spike", [8, 8], 1.0),
    ]  # fmt: skip


def test_what_is_not_finite_is_no_spike_and_nothing_is_judged_early_or_by_default(tmp_path):
    guard = spikes(tmp_path, rollback_after=1, rollback_margin_steps=0)
    guard.on_step_end(4)
    feed(guard, [*LEVEL, math.nan, math.inf, math.nan])
    assert (guard.events, guard.rollback_targets()) == ([], [])
    assert not any(feed(spikes(tmp_path, window_steps=30), [1.0] * 9 + [50.0]))
    assert not any(feed(spikes(tmp_path, num_sigmas=0.0), [1.0] * 50 + [50.0]))


def test_a_small_rise_over_a_flat_line_is_no_spike(tmp_path):
    assert not any(feed(spikes(tmp_path), [1.0] * 8 + [1.05, 1.0]))


def test_a_new_level_is_accepted(tmp_path):
    assert feed(spikes(tmp_path, max_consecutive=2), LEVEL + [5.0] * 5) == [False] * 6 + [True] * 2 + [False] * 3


def test_the_way_back_leads_to_a_quiet_checkpoint_before_the_first_spike(tmp_path):
    guard = spikes(tmp_path, rollback_after=2, rollback_window_steps=4, rollback_margin_steps=3,
                   max_rollbacks=1, lr_factor=0.5,
                   lr_factor_steps=2)  # fmt: skip
    feed(guard, LEVEL)
    guard.on_step_end(2)
    guard.on_step_end(6)
    feed(guard, [9.0, 1.0], first=6)
    guard.on_step_end(8)  # a spike is too near
    assert guard.pinned_checkpoints == [2, 6]
    assert guard.rollback_targets() == []
    feed(guard, [9.0], first=8)
    assert guard.on_step_end(9) == [2]  # 6 is too close to the spike in batch 6
    guard.rolled_back(9, 2)
    assert guard.events[-1] == {"kind": "rollback", "step": 9, "batches": [2, 8]}
    for step, rate in ((10, 0.5), (11, 1.0)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        guard.lower_rate(optimizer, step)
        assert optimizer.param_groups[0]["lr"] == rate
    feed(guard, [1.0, 9.0, 9.0], first=12)
    assert guard.rollback_targets() == []  # once was enough


def test_all_ranks_leave_out_what_any_finds(tmp_path):
    guard = LossSpikes(LossSpikeConfig(num_sigmas=6.0), lambda flag: 1.0, tmp_path / "x", is_first=False)
    assert feed(guard, [1.0]) == [True]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"window_steps": 3}, "window_steps"), ({"min_loss_rise": -1.0}, "min_loss_rise"),
     ({"lr_factor": 0.0}, "lr_factor"),
     ({"rollback_after": 2, "num_sigmas": 0.0}, "rollback_after"), ({"rollback_after": 9}, "rollback_after")],
)  # fmt: skip
def test_what_makes_no_sense_is_named(change, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        LossSpikeConfig(**{"num_sigmas": 6.0, **change})


@pytest.mark.parametrize(
    "change",
    [{"gradient_sync": {"kind": "int8"}}, {"async_updates": {"mode": "delayed"}}, {"checkpoint_every_steps": 0}],
)
def test_a_way_back_needs_checkpoints_and_updates_that_can_be_taken_back(tiny, change):
    with config_error("loss_spikes.rollback_after", match=r"^loss_spikes.rollback_after: "):
        tiny.settings(loss_spikes={"num_sigmas": 6.0, "rollback_after": 2}, **change)


def test_hogwild_has_nobody_who_sees_all_updates(tiny):
    with config_error("loss_spikes.num_sigmas"):
        tiny.settings(loss_spikes={"num_sigmas": 6.0}, async_updates={"mode": "hogwild"})


def test_where_a_run_may_go_back_to_is_part_of_what_it_is():
    plain, back = {"num_steps": 9}, {"num_steps": 9, "loss_spikes": LossSpikeConfig(num_sigmas=6.0, rollback_after=2)}
    for settings, alike in ((plain, True), (back, False)):
        two = [TrainConfig(checkpoint_every_steps=every, **settings).identity() for every in (2, 3)]  # pyright: ignore
        assert (two[0] == two[1]) is alike


@dataclass
class Bad(Objective):
    """The tiny objective; the losses of some batches count a hundredfold."""

    inner: NextToken
    bad: tuple[int, ...]
    factor: float = 1.0

    def batches(self, model, *, first, rank, world_size):
        found = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for number, batch in enumerate(found, start=first):
            self.factor = 100.0 if number in self.bad else 1.0
            yield batch

    def weights(self, batch):
        return self.inner.weights(batch)

    def losses(self, output, batch, model):
        losses = self.inner.losses(output, batch, model).losses
        return Terms({name: loss * self.factor for name, loss in losses.items()})


@dataclass
class StopAt:
    step: int
    every: int = 1

    def observe(self, info):
        if info.step == self.step:
            raise Stopped("here")


BACK = {"num_sigmas": 6.0, "window_steps": 6, "rollback_after": 2, "rollback_window_steps": 4,
        "rollback_margin_steps": 1, "lr_factor": 0.5,
        "lr_factor_steps": 2}  # fmt: skip


def train(tiny, folder, bad=(7, 8), *, model=None, techniques=None, **spike_settings):
    config = tiny.settings(num_steps=16, eval_every_steps=0, keep_last=1, loss_spikes={**BACK, **spike_settings},
                               schedule={"kind": "constant", "warmup_fraction": 0.0})  # fmt: skip
    objective = Bad(NextToken(tiny.Rows()), bad)
    return tiny.run(folder, config, objective=objective, model=model, techniques=techniques or [])


def test_the_run_goes_back_and_on_with_the_following_batches(tiny, tmp_path):
    model = tiny.tiny_model()
    result = train(tiny, tmp_path, model=model)
    assert [event["kind"] for event in result.summary_of("loss_spikes")["left_out"]] == ["spike", "spike", "rollback"]
    assert result.summary_of("loss_spikes")["left_out"][-1] == {"kind": "rollback", "step": 9, "batches": [6, 8]}
    assert result.summary_of("anomalies")["num_events"]["rollback"] == 1
    assert [event["kind"] for event in read_records(tmp_path / "anomalies.jsonl")][:3] == [
        "skipped_spike", "skipped_spike", "rollback",
    ]  # fmt: skip
    records = read_records(tmp_path / "metrics.jsonl")
    assert [step for step, _ in column(records, "loss")] == list(range(1, 17))
    rates = dict(column(records, "learning_rate"))
    assert [rates[step] for step in (9, 10, 11, 12)] == [1e-2, 5e-3, 5e-3, 1e-2]
    by_hand = tiny.tiny_model()
    _twin(tiny, by_hand)
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, by_hand.state_dict()[name], rtol=1e-5, atol=1e-7), name


def _twin(tiny, model) -> None:
    """What the run comes to without any of the machinery: AdamW over batches 0 to 5 and 9 to 15."""
    from modelwright.train.objective import forward
    from modelwright.train.optim.build import build_optimizer

    config = tiny.settings()
    optimizer = build_optimizer(
        model, "adamw", learning_rate=1e-2, betas=config.betas, eps=config.adam_eps, weight_decay=config.weight_decay
    )
    objective = NextToken(tiny.Rows())
    for number in [*range(6), *range(9, 16)]:
        batch = tiny.Rows().batch(number)
        loss = objective.losses(forward(model, batch), batch, model).losses["loss"] / objective.weights(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 if number in (9, 10) else 1e-2
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 9, 11])
def test_stopped_before_between_and_after_it_goes_on_with_the_same_bits(tiny, tmp_path, step):
    """The process dies after a step without saving; it begins again from the checkpoint before."""
    once, twice = tiny.tiny_model(), tiny.tiny_model()
    train(tiny, tmp_path / "once", model=once)
    with pytest.raises(Stopped):
        train(tiny, tmp_path / "twice", techniques=tiny.watching(stop=StopAt(step)))
    result = train(tiny, tmp_path / "twice", model=twice)
    assert [event["kind"] for event in result.summary_of("loss_spikes")["left_out"]] == ["spike", "spike", "rollback"]
    assert all(torch.equal(one, two) for one, two in zip(once.parameters(), twice.parameters(), strict=True))
    for name in ("loss_spikes.jsonl", "anomalies.jsonl"):
        assert (tmp_path / "once" / name).read_text() == (tmp_path / "twice" / name).read_text()


def test_spikes_without_a_way_back_only_leave_updates_out(tiny, tmp_path):
    result = train(tiny, tmp_path, rollback_after=0)
    assert [event["batches"] for event in result.summary_of("loss_spikes")["left_out"]] == [[7, 7], [8, 8]]


@dataclass
class Damage(StopAt):
    """Checkpoints are written beside the steps: waits until this one is there."""

    path: str = ""

    def observe(self, info):
        if info.step == self.step:
            index, until = Path(self.path) / "index.json", time.monotonic() + 60
            while not index.exists() and time.monotonic() < until:
                time.sleep(0.01)
            index.write_text("{}")


def test_a_damaged_checkpoint_is_no_way_back_and_the_one_before_is(tiny, tmp_path):
    damage = Damage(8, path=str(tmp_path / "checkpoints/step-00000006"))
    result = train(tiny, tmp_path, techniques=tiny.watching(damage=damage))
    assert result.summary_of("loss_spikes")["left_out"][-1] == {"kind": "rollback", "step": 9, "batches": [4, 8]}
