"""Adaptive precision step by step, without a run around it: what a step brings is set by hand."""

import copy
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.core.config import parse
from modelwright.core.resources import hardware
from modelwright.model.attention import packed_attend
from modelwright.ops.lowp_linear import Format
from modelwright.parallel.mesh import World
from modelwright.train.optim.build import OptimizerKind, build_optimizer
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.controllers import Bandit, DtypeTimings
from modelwright.train.precision.indicators import GradientStats
from modelwright.train.precision.policy import Kind, PrecisionConfig
from modelwright.train.technique import LOSS_SPIKE, NOT_FINITE, Update
from modelwright.train.techniques import adaptive_precision
from modelwright.train.techniques.adaptive_precision import AdaptivePrecision, memory_share, momentum_of
from tiny_decoder import make_decoder

pytestmark = pytest.mark.slow

SECONDS: dict[Format, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0}
KINDS: tuple[Kind, ...] = ("attention", "ffn")
RULES = {
    "kind": "rules",
    "decide_every_steps": 4,
    "measure_steps": 1,
    "cooldown_decisions": 0,
    "revert_on_loss_rise": 0.5,
    "tolerance": 0.5,
}


class Rig:
    """One process, one tiny model, gradients at random; every format but FP32 is harmless at first."""

    def __init__(
        self,
        folder: Path,
        adaptive: dict[str, Any],
        policy: str = "fp32",
        seconds: Mapping[Format, float] = SECONDS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = make_decoder()
        config = parse(PrecisionConfig, {"policy": policy, "adaptive": {**RULES, **adaptive}}, constants=True)
        self.formats = ModelPrecision(self.model, config)
        self.optimizer = build_optimizer(
            self.model, "adamw", learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        self.trials: list[dict[str, Format]] = []
        self.harmful: set[tuple[str, Format]] = set()
        self.adaptive = AdaptivePrecision(
            config=config.adaptive,
            formats=self.formats,
            names=self.names,
            num_holders=[1] * len(self.names),
            optimizer=self.optimizer,
            world=World(rank=0, size=1, device=torch.device("cpu")),
            machine=DtypeTimings(
                {(kind, name): took for kind in ("attention", "ffn") for name, took in seconds.items()}, 0.1
            ),
            trial=self.trial,
            scale=lambda: 1.0,
            path=folder / "formats.jsonl",
        )

    def trial(self) -> float:
        self.trials.append(dict(self.formats.formats))
        return 2.0 + sum(pair in self.harmful for pair in self.formats.formats.items())

    def step(self, number: int, loss: float = 2.0, *, overflows: bool = False, skip: bool = False) -> None:
        torch.manual_seed(number)
        self.adaptive.begin_step(number)
        tokens = torch.randint(0, self.model.config.vocab_size, (2, 8))
        positions, segments = torch.arange(8).expand(2, 8), torch.zeros(2, 8, dtype=torch.long)
        self.model(tokens, positions, packed_attend(segments)).float().square().mean().backward()
        norm = math.inf if overflows else 1.0
        reason = NOT_FINITE if overflows else LOSS_SPIKE if skip else ""
        update = Update(
            step=number, num_steps=100, gradients=[], losses={"loss": loss}, weights={"loss": 1.0}, grad_norm=norm,
            skip_reason=reason,
        )  # fmt: skip
        self.adaptive.on_gradients(update)
        if not (overflows or skip):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self, numbers: Sequence[int], loss: Callable[[int], float] = lambda step: 2.0) -> None:
        for number in numbers:
            self.step(number, loss(number))

    @property
    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.adaptive.state_dict()))

    @property
    def chosen(self) -> set[Format]:
        return set(self.adaptive.switcher.formats.values())


def test_steps_that_overflow_speak_against_fp16(tmp_path):
    """Three of 8 steps in FP16 overflow, which is more than a tolerance of 0.3."""
    rig = Rig(tmp_path, {"decide_every_steps": 8, "candidates": ["bf16"], "tolerance": 0.3}, policy="fp16_mixed")
    rig.steps(range(8))
    assert rig.chosen == {"fp16"}
    for number in range(8, 16):
        rig.step(number, overflows=number < 11)
    signs = rig.adaptive.switcher.last_signs.values()
    assert {one.skipped_share for one in signs} == {3 / 8}
    assert rig.chosen == {"bf16"}
    rig.steps(range(16, 24))
    assert {one.skipped_share for one in rig.adaptive.switcher.last_signs.values()} == {0.0}


def test_steps_that_overflow_say_nothing_of_parts_in_other_formats(tmp_path):
    rig = Rig(tmp_path, {"candidates": ["bf16", "fp16"]})
    rig.steps(range(2))
    rig.step(2, overflows=True)
    rig.step(3)
    assert {one.skipped_share for one in rig.adaptive.switcher.last_signs.values()} == {0.0}


@pytest.mark.parametrize("kind", ["rules", "bandit"])
def test_a_decision_whose_step_was_skipped_is_made_at_the_next_good_one(tmp_path, monkeypatch, kind):
    """And a run that is resumed in between comes to the same."""
    monkeypatch.setattr(adaptive_precision, "memory_share", lambda device: 0.5)
    given = {"kind": kind, "candidates": ["bf16", "int8"], "measure_steps": 2}
    rig, other = (Rig(tmp_path / name, given) for name in ("whole", "resumed"))
    rig.steps(range(3))
    rig.step(3, overflows=True)
    rig.step(4, skip=True)
    assert rig.chosen == {"fp32"}
    assert len(rig.state["losses"]) == 5
    assert rig.state["observed"]["0"]
    other.model.load_state_dict(rig.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(rig.optimizer.state_dict()))
    other.adaptive.load_state_dict(rig.state)
    for one in (rig, other):
        one.step(5)
    assert "fp32" not in rig.chosen
    assert [line["step"] for line in map(json.loads, rig.adaptive.path.read_text().splitlines())] == [6] * 4
    for one in (rig, other):
        one.steps(range(6, 9))
    assert rig.state["losses"] == [2.0]  # the next decision came in its own time
    assert other.state == rig.state


def falling(step: int) -> float:
    return 2.0 + 6.0 * (step + 1) ** -0.5 + random.Random(step).gauss(0.0, 0.02)


def rewards_of(rig: Rig, monkeypatch) -> list[float]:
    """The share of time saved in everything that the bandit hears, less what the estimate says."""
    heard, usual = [], Bandit.learn

    def learn(self, part, signs, chosen, loss_excess):
        calm = replace(signs, **{name: {} for name in ("weight_error", "input_error", "gradient_error", "sensitivity")})
        heard.append(self.reward(calm, chosen, loss_excess) - (1.0 - signs.speed[chosen]))
        usual(self, part, signs, chosen, loss_excess)

    monkeypatch.setattr(Bandit, "learn", learn)
    return heard


def test_a_loss_that_does_not_depend_on_formats_teaches_what_time_they_save(tmp_path, monkeypatch):
    rig = Rig(
        tmp_path,
        {"kind": "bandit", "decide_every_steps": 10, "candidates": ["bf16", "int8"], "revert_on_loss_rise": 0.05},
    )
    heard = rewards_of(rig, monkeypatch)
    rig.steps(range(10), falling)
    first = dict(rig.adaptive.switcher.formats)
    rig.steps(range(10, 20), falling)
    assert "fp32" not in first.values()
    assert rig.adaptive.switcher.good == first
    rig.steps(range(20, 80), falling)
    assert set(heard) == {0.0}
    rig.steps(range(80, 90), lambda step: 1.04 * falling(step))
    assert heard[-1] == pytest.approx(-5 * 0.04, rel=0.4)


class Flat(nn.Module):
    """One matrix by a name of the blocks', so that Muon takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Linear(400, 300, bias=False)


def measured(
    kind: OptimizerKind, betas: tuple[float, float], *, noise: float, num_steps: int
) -> tuple[GradientStats, float]:
    """After so many steps with gradients of a mean of norm 1 and noise of that variance, clipped to 1 all; and the size
    of the next update, measured at the weights."""
    torch.manual_seed(0)
    model = Flat()
    weight = model.blocks.weight
    optimizer = build_optimizer(model, kind, learning_rate=0.01, betas=betas, eps=1e-8, weight_decay=0.0)
    mean = torch.randn_like(weight) * float(noise < math.inf)
    spread = math.sqrt(noise) if noise < math.inf else 1.0
    for step in range(num_steps):
        weight.grad = mean + spread * torch.randn_like(weight)
        momentum = momentum_of(optimizer.state.get(weight, {}), optimizer.param_groups[0], step)
        sums = GradientStats.of(weight.detach(), weight.grad, momentum, scale=1.0)
        weight.grad /= weight.grad.norm()
        before = weight.detach().clone()
        optimizer.step()
    return sums, float((weight.detach() - before).norm() / before.norm())


OPTIMIZERS: list[tuple[OptimizerKind, tuple[float, float]]] = [
    ("adamw", (0.9, 0.95)),
    ("adamw", (0.9, 0.999)),
    ("adamw", (0.5, 0.999)),
    ("adamw_8bit", (0.9, 0.95)),
    ("lion", (0.9, 0.99)),
    ("muon", (0.9, 0.95)),
]


@pytest.mark.parametrize("num_steps", [2, 5, 60])
@pytest.mark.parametrize(("kind", "betas"), OPTIMIZERS)
def test_gradient_noise_is_tr_sigma_over_the_square_of_the_mean(kind, betas, num_steps):
    """Whatever the optimizer, its betas, the number of steps and clipping, which hits noisy gradients harder."""
    assert measured(kind, betas, noise=0.0, num_steps=num_steps)[0].gradient_noise < 0.01
    assert measured(kind, betas, noise=4.0, num_steps=num_steps)[0].gradient_noise == pytest.approx(4.0, rel=0.1)
    assert measured(kind, betas, noise=math.inf, num_steps=num_steps)[0].gradient_noise > 100


@pytest.mark.parametrize(("kind", "betas"), OPTIMIZERS)
def test_update_to_weight_is_what_the_optimizer_does(kind, betas):
    """Told before the update, of which an average knows the last gradient not yet."""
    found, wanted = measured(kind, betas, noise=0.1, num_steps=20)
    assert found.update_to_weight == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("kind", ["rules", "bandit"])
def test_every_part_is_probed_in_a_format_before_it_computes_in_it(tmp_path, kind):
    """INT8 spoils one feed-forward part: that part never computes in it outside of a trial."""
    rig = Rig(tmp_path, {"kind": kind, "candidates": ["int8"]})
    rig.harmful.add(("blocks.1.ffn", "int8"))
    rig.steps(range(4))
    formats = rig.adaptive.switcher.formats
    assert formats.pop("blocks.1.ffn") == "fp32"
    assert set(formats.values()) == {"int8"}
    assert rig.adaptive.trials.sensitivity["blocks.1.ffn", "int8"] == 0.5
    assert len(rig.trials) == 5  # all in FP32, and each part in INT8


def test_probes_are_made_once_and_all_formats_take_their_turns(tmp_path):
    rig = Rig(tmp_path, {"candidates": ["bf16", "int8"]})
    rig.steps(range(4))
    assert rig.chosen == {"int8"}
    rig.trials.clear()
    rig.steps(range(4, 8))
    assert len(rig.trials) == 1 + 2  # as it is, in INT8, and the second part in FP32 and BF16
    assert {chosen for _, chosen in rig.adaptive.trials.sensitivity} == {"bf16", "int8"}


SLOW: dict[Format, float] = {**SECONDS, "bf16": 9.0}


def slow_in_bf16(folder: Path, kind: str) -> Rig:
    """FP32 is the fastest there is."""
    return Rig(folder, {"kind": kind, "candidates": ["bf16"], "exploration": 1.0}, seconds=SLOW)


@pytest.mark.parametrize("kind", ["rules", "bandit"])
def test_a_smaller_format_is_taken_though_it_is_slow_once_memory_is_short(tmp_path, monkeypatch, kind):
    """What is short at the second decision is looked at in the third period, also by a run that is resumed with less
    in use."""
    share, rig = [0.5], slow_in_bf16(tmp_path / "whole", kind)
    monkeypatch.setattr(adaptive_precision, "memory_share", lambda device: share[0])
    rig.steps(range(4))
    assert not rig.adaptive.looks
    share[0] = 1.0
    rig.steps(range(4, 8))
    assert rig.adaptive.looks
    assert rig.chosen == {"fp32"}
    share[0], other = 0.2, slow_in_bf16(tmp_path / "resumed", kind)
    other.adaptive.load_state_dict(rig.state)
    assert other.adaptive.memory_pressure == 1.0
    for one in (rig, other):
        one.steps(range(8, 12))
        assert one.chosen == {"bf16"}
        assert {signs.memory_pressure for signs in one.adaptive.switcher.last_signs.values()} == {1.0}


def test_the_fullest_rank_decides(tmp_path, monkeypatch):
    rig = slow_in_bf16(tmp_path, "rules")
    monkeypatch.setattr(adaptive_precision, "memory_share", lambda device: 0.3)
    monkeypatch.setattr(World, "maxima", lambda self, *values: [max(0.93, value) for value in values])
    rig.steps(range(4))
    assert rig.state["memory_pressure"] == 0.93


def test_memory_in_use_is_a_share_of_the_machines():
    device = torch.device("cpu")
    share = memory_share(device)
    assert 0 < share < 1
    more = memory_share(device, int(0.1 * hardware()["memory_bytes"]))
    assert more == pytest.approx(min(1.0, share + 0.1), abs=0.01)
