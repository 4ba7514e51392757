"""Claim: sparse activation, adaptive precision and gradient compression together train twenty times as efficiently.

Wall time of training to the same held-out loss on the same text: a competent plain loop against the whole stack, on one
host and on two that a link of 100 Mbit/s joins. Every arm has its own learning rate and the fewest steps that reach the
plain loop's loss, both found on seeds that are not reported. Ingredients are added one at a time, and left out one at a
time; those that the statement names and that do not pay here are added to the whole stack, to show what they cost. A
model twice as wide is trained by the plain loop and by the whole stack alone.
"""

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import BoundedSemaphore
from typing import Any

import torch

from modelwright.core.config import merge
from modelwright.core.resources import num_usable_cores
from modelwright.ops.narrow import is_widened
from modelwright_claims import plain_training
from modelwright_claims.claim import Claim, Figure, Kind, Result, Setting
from modelwright_claims.efficiency_probe import MBIT, Arm, make_rows
from modelwright_claims.efficiency_probe import measure as train_arm
from modelwright_claims.kept import Kept, file_digest, setup_digest
from modelwright_claims.netns import missing
from modelwright_claims.statistics import spread
from modelwright_claims.workbench import Size

PUBLISHED, ONE_HOST_GOAL = 20.0, 5.0
TUNING_SEEDS, SEEDS = (4000, 4010), (4001, 4002, 4003)
"""The plain loop is tuned by its mean loss over all of the first, the other arms on the first of them."""
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
"""Those below the second are tried where that is the best of it and those above."""
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.25, 0.18, 0.125)
"""Of the plain loop's steps that an arm is tried with, until it no longer reaches its loss; then the middle between the
last two."""
PLAIN, FULL = "plain", "everything"
MARGIN = 0.01
"""Nats below the plain loop's loss that fewer steps must reach on the tuning seed: others may do a little worse."""
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """What it changes in an arm."""

    name: str
    changes: Mapping[str, Any]
    settings: Settings

    def added_to(self, arm: Arm) -> Arm:
        return replace(arm, **self.changes, settings=merge(arm.settings, self.settings))


OPERATORS = Ingredient(name="own loop and operators", changes={"plain": False}, settings={})
PACKING = Ingredient(name="packing", changes={"mode": "best_fit"}, settings={})
MUON = Ingredient(name="Muon", changes={}, settings={"optimizer": "muon"})
LOCAL = Ingredient(
    name="INT8 local steps",
    changes={},
    settings={"transport": {"kind": "int8", "local_steps": {"every": 20}}},
)
SPARSE = Ingredient(
    name="sparse rows",
    changes={},
    settings={"sparse": {"batch": {"signal": "loss", "keep": 1 / 3, "explore": 0.2, "dense_share": 0.03}}},
)
BF16 = Ingredient(
    name="BF16",
    changes={},
    settings={"precision": {"policy": "bf16_mixed", "results": "bf16", "layers": {"embedding": "bf16"}}},
)
ADAPTIVE = Ingredient(
    name="adaptive precision",
    changes={},
    settings={"precision": {"adaptive": {"kind": "rules", "every": 50, "window": 4}}},
)
"""Begins with the formats of the arm that it is added to."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The plain arm, what the whole stack adds to it one after the other, and what is tried on top of that."""

    plain: Arm
    ingredients: tuple[Ingredient, ...]
    on_top: tuple[Ingredient, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Arms that are compared at one size, and how many times as fast as the plain one the whole stack should be."""

    arms: Mapping[str, Arm]
    size: Size
    goal: float

    @property
    def num_hosts(self) -> int:
        return self.arms[PLAIN].hosts


def stacks() -> dict[str, Stack]:
    """Of this machine: BF16 belongs to them where the processor has instructions for it."""
    narrow = () if is_widened(torch.bfloat16, torch.device("cpu")) else (BF16,)
    return {
        "one host": Stack(
            plain=Arm(plain=True, mode="pad"),
            ingredients=(OPERATORS, PACKING, *narrow, MUON),
            on_top=(SPARSE, ADAPTIVE),
        ),
        "two hosts": Stack(
            plain=Arm(plain=True, mode="pad", hosts=2), ingredients=(OPERATORS, PACKING, *narrow, MUON, LOCAL)
        ),
    }


def scenes(*, quick: bool) -> dict[str, Scene]:
    """Each stack with all arms, and on a wider model without the single ingredients; in quick mode a short sketch."""
    goals = {"one host": ONE_HOST_GOAL, "two hosts": PUBLISHED}
    all_arms = {name: arms_of(stack) for name, stack in stacks().items()}
    ends = {name: {end: arms[end] for end in (PLAIN, FULL)} for name, arms in all_arms.items()}
    if quick:
        size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=60)
        return {name: Scene(arms=arms, size=size, goal=goals[name]) for name, arms in ends.items()}
    size = Size(model_dim=128, num_layers=4, seq_len=128, batch_rows=16, num_steps=400)
    wide = replace(size, model_dim=256)
    return {
        **{name: Scene(arms=arms, size=size, goal=goals[name]) for name, arms in all_arms.items()},
        **{f"{name}, wide": Scene(arms=arms, size=wide, goal=goals[name]) for name, arms in ends.items()},
    }


def arms_of(stack: Stack) -> dict[str, Arm]:
    """The plain arm, ingredients added one after the other, the whole stack without each of them in turn, and with
    each of those on top.

    Without our own loop none of the others can be had, so that it is never the one left out.
    """
    plain, ingredients = stack.plain, stack.ingredients
    arms, arm = {PLAIN: plain}, plain
    for ingredient in ingredients:
        arm = ingredient.added_to(arm)
        arms[f"+ {ingredient.name}"] = arm
    arms[FULL] = arms.pop(f"+ {ingredients[-1].name}")
    for left_out in ingredients[1:]:
        arm = plain
        for ingredient in ingredients:
            arm = arm if ingredient is left_out else ingredient.added_to(arm)
        arms[f"without {left_out.name}"] = arm
    arms |= {f"{FULL} + {more.name}": more.added_to(arms[FULL]) for more in stack.on_top}
    return {name: arm for number, (name, arm) in enumerate(arms.items()) if arm not in list(arms.values())[:number]}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """An arm's own rate and steps."""

    size: Size
    loss: float


def measure(setting: Setting) -> Result:
    """All scenes, tuned and then timed; two hosts only where networks can be made."""
    tuning = Tuning(setting, quick=setting.quick)
    compared = {name: one for name, one in scenes(quick=setting.quick).items() if one.num_hosts == 1 or not missing()}
    tuned = {name: tuning.tune(scene.arms, scene.size) for name, scene in compared.items()}
    found = {name: run_all(setting, name, scene.arms, tuned[name]) for name, scene in compared.items()}
    return judge(found, tuned, compared)


class Tuning:
    """Finds rates and numbers of steps by losses on the tuning seeds; a run that is asked for again is not made again,
    not in a later call either (`Setting.kept`), but for the plain loop's once its own source has changed.

    How many hosts there are matters to a loss only where they do not sum gradients exactly, and how fast their link is,
    or the machine, not at all: so runs are made on one host, or on two that nothing slows down, and several at a time.
    """

    def __init__(self, setting: Setting, *, quick: bool) -> None:
        self.setting = setting
        self.rates = RATES[2:3] if quick else RATES
        self.shares = SHARES[:2] if quick else SHARES
        self.seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
        self._losses = Kept(setting.kept / "efficiency_20x.json" if setting.kept else None)
        self._cores = BoundedSemaphore(num_usable_cores())

    def tune(self, arms: Mapping[str, Arm], size: Size) -> dict[str, Tuned]:
        """The best rate of the plain loop at all steps; of every other arm the fewest steps that reach its loss."""
        make_rows(self.setting, size)
        others = {name: arm for name, arm in arms.items() if name != PLAIN}
        with ThreadPoolExecutor(len(others)) as pool:
            plain = self._best_of_all(arms[PLAIN], size)
            found = pool.map(lambda arm: self._fewest(arm, size, plain.loss), others.values())
            return {PLAIN: plain, **dict(zip(others, found, strict=True))}

    def _fewest(self, arm: Arm, size: Size, wanted: float) -> Tuned:
        best, reached = self._best_of_all(arm, size), 1.0
        if best.loss > wanted - MARGIN:
            return best
        for share in self.shares[1:]:
            if (tried := self._near(arm, size, share, best, wanted - MARGIN)).loss > wanted - MARGIN:
                tried = self._near(arm, size, (share + reached) / 2, best, wanted - MARGIN)
                return tried if tried.loss <= wanted - MARGIN else best
            best, reached = tried, share
        return best

    def _near(self, arm: Arm, size: Size, share: float, best: Tuned, enough: float) -> Tuned:
        """With fewer steps, at the best rate with more of them or, unless that is enough, the one above."""
        fewer = replace(size, num_steps=_whole_periods(round(share * size.num_steps), arm))
        near = [rate for rate in self.rates if rate >= best.size.learning_rate][:2]
        return self._best(arm, fewer, near, enough=enough)

    def _best_of_all(self, arm: Arm, size: Size) -> Tuned:
        first = self.rates[:2][-1]
        best = self._best(arm, size, [rate for rate in self.rates if rate >= first])
        if best.size.learning_rate == first:
            best = self._best(arm, size, [rate for rate in reversed(self.rates) if rate <= first])
        return best

    def _best(self, arm: Arm, size: Size, rates: Sequence[float], *, enough: float = -math.inf) -> Tuned:
        """Of the rates in their order, until losses rise, or the first whose loss is `enough`."""
        best: Tuned | None = None
        for rate in rates:
            at = replace(size, learning_rate=rate)
            tried = Tuned(size=at, loss=self._loss(arm, at))
            if best is not None and not tried.loss < best.loss:
                break
            best = tried
            if best.loss <= enough:
                break
        assert best is not None
        return best

    def _loss(self, arm: Arm, size: Size) -> float:
        seeds = self.seeds if arm.plain else self.seeds[:1]
        if "transport" not in arm.settings:
            arm = replace(arm, hosts=1)
        with ThreadPoolExecutor(len(seeds)) as pool:
            return statistics.fmean(pool.map(lambda seed: self._loss_of(arm, size, seed), seeds))

    def _loss_of(self, arm: Arm, size: Size, seed: int) -> float:
        key = f"{arm} {size}, text of Python {platform.python_version()}, seed {seed}"
        if arm.plain:
            key += f", {file_digest(plain_training)}"
        if key not in self._losses:
            with self._cores:
                found = train_arm(self.setting, arm, size, seed=seed, mbit=0.0, threads=1)["heldout_loss"]
            self._losses[key] = found
            self.setting.progress.note(f"{arm}: {size.num_steps} steps at {size.learning_rate:g}, {seed}: {found:.4f}")
        return self._losses[key]


def _whole_periods(num_steps: int, arm: Arm) -> int:
    """Local steps end with a meeting in any case; a run of whole periods wastes none."""
    every = arm.settings.get("transport", {}).get("local_steps", {}).get("every", 1)
    return max(every, num_steps // every * every)


def run_all(
    setting: Setting, where: str, arms: Mapping[str, Arm], tuned: Mapping[str, Tuned]
) -> dict[str, list[dict[str, float]]]:
    """All arms of a seed one after the other, so that what else the machine does meets all of them.

    A seed that was finished in an earlier call, by the same code on the same machine, is not made again.
    """
    kept = Kept(setting.kept / "efficiency_20x-timed.json" if setting.kept else None)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for seed in SEEDS[:1] if setting.quick else SEEDS:
        made = {name: (str(arm), str(tuned[name].size)) for name, arm in arms.items()}
        key = f"{where}, seed {seed}: {made}, {setup_digest()}"
        if key not in kept:
            runs: dict[str, dict[str, float]] = {}
            for name, arm in arms.items():
                runs[name] = train_arm(setting, arm, tuned[name].size, seed=seed)
                setting.progress.note(f"{where}, {name}, seed {seed}: {runs[name]}")
            kept[key] = runs
        for name, run in kept[key].items():
            found[name].append(run)
    return found


def judge(
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]],
    tuned: Mapping[str, Mapping[str, Tuned]],
    compared: Mapping[str, Scene],
) -> Result:
    """Met when every scene reaches its goal, two hosts the published number of times as fast, at no higher loss."""
    figures: dict[str, Figure] = {}
    samples: dict[str, Sequence[float]] = {}
    said, met = [], True
    for where, arms in found.items():
        for name, runs in arms.items():
            ratios, gap = _beside_plain(arms, name)
            if name != PLAIN:
                figures[f"{where}: faster, {name}"] = Figure(
                    value=statistics.median(ratios), unit="x", spread=spread(ratios)
                )
                figures[f"{where}: held-out loss above plain, {name}"] = Figure(value=gap, unit="nats")
            figures[f"{where}: steps, {name}"] = Figure(value=tuned[where][name].size.num_steps, unit="")
            samples[f"{where}: seconds, {name}"] = [run["seconds"] for run in runs]
            samples[f"{where}: held-out loss, {name}"] = [run["heldout_loss"] for run in runs]
        ratios, gap = _beside_plain(arms, FULL)
        faster = statistics.median(ratios)
        said.append(f"{where}: {faster:.1f}x (goal {compared[where].goal:g}x), held-out loss {gap:+.3f} nats")
        met &= faster >= compared[where].goal and gap <= 0.0
    alone = all(scene.num_hosts == 1 for scene in compared.values())
    size, *_ = (scene.size for scene in compared.values())
    widths = {name: scene.size.describe()["parameters"] for name, scene in compared.items() if scene.size != size}
    kind: Kind = "met" if met and not alone else "short"
    return Result(
        kind=kind,
        reason="; ".join(said) + (f"; two hosts: {missing()}" if alone else ""),
        figures=figures,
        conditions=size.describe()
        | {f"parameters, {name}": parameters for name, parameters in widths.items()}
        | {
            "hosts": f"network namespaces joined by {MBIT:g} Mbit/s, one process of one thread each; one host: "
            f"{num_usable_cores()} cores",
            "batch": f"as many real tokens as {size.batch_rows} packed rows of {size.seq_len}",
            "tuned": f"the plain loop by its mean loss over seeds {', '.join(map(str, TUNING_SEEDS))}, other arms on "
            "the first; runs that earlier calls kept, of earlier sources of ours too, are not made again",
            "rates tried": ", ".join(f"{rate:g}" for rate in RATES),
            **_arms_in_words(tuned),
            "time": "of all training steps; preparation, start and evaluation are left out on both sides; all arms of "
            "a seed in one call, seeds perhaps in several calls of the same sources on this machine",
        },
        samples=samples,
    )


def _arms_in_words(tuned: Mapping[str, Mapping[str, Tuned]]) -> dict[str, str]:
    """What everything is, the rates that were chosen, and which arms never reach the plain loop's loss."""
    rates, beyond = [], []
    for where, arms in tuned.items():
        rates.append(f"{where}: {', '.join(f'{name} {one.size.learning_rate:g}' for name, one in arms.items())}")
        beyond += [f"{where}: {name}" for name, one in arms.items() if one.loss > arms[PLAIN].loss]
    everything = {name: ", ".join(one.name for one in stack.ingredients) for name, stack in stacks().items()}
    return {
        "everything": "; ".join(f"{name}: {ingredients}" for name, ingredients in everything.items()),
        "rates": "; ".join(rates),
        "all steps and still not the plain loop's loss": "; ".join(beyond) or "none",
    }


def _beside_plain(arms: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> tuple[list[float], float]:
    """Ratios of seconds by seed, and the mean difference of held-out losses."""
    pairs = list(zip(arms[name], arms[PLAIN], strict=True))
    ratios = [plain["seconds"] / one["seconds"] for one, plain in pairs]
    return ratios, statistics.fmean(one["heldout_loss"] - plain["heldout_loss"] for one, plain in pairs)


CLAIM = Claim(
    name="efficiency_20x",
    statement="Dynamic sparse activation, adaptive precision and gradient compression together train twenty times as "
    "efficiently.",
    source="published guides to DeepSeek-style training",
    published="20x training efficiency, against what and measured how not told",
    compared="wall time to the held-out loss that a competent plain loop reaches (FP32, padded batches, eager "
    "operators, AdamW, DDP's exact sums), on one host and on two joined by 100 Mbit/s; ingredients added and left out "
    "one at a time; each arm at its own best rate with the fewest steps that reach that loss on seeds of their own, or "
    "with all steps where none do; on a model twice as wide the plain loop and the whole stack alone",
    target=f"{PUBLISHED:g}x on two hosts and {ONE_HOST_GOAL:g}x on one, at no higher held-out loss, at both widths",
    headline=(
        "one host: faster, everything",
        "two hosts: faster, everything",
        "one host, wide: faster, everything",
        "two hosts, wide: faster, everything",
    ),
    measure=measure,
)
