"""Claim: sparse activation, adaptive precision and gradient compression together train twenty times as efficiently.

Wall time of training to the same held-out loss on the same text: a competent plain loop against the whole stack, on one
host and on two that a link of 100 Mbit/s joins. Every arm has its own learning rate and the fewest steps that reach the
plain loop's loss, both found on seeds that are not reported. On one host ingredients are added one at a time, and left
out one at a time; those that the statement names and that do not pay here are added to the whole stack, to show their
cost. On two hosts the whole stack is compared with the plain loop, and with the stack that sums gradients exactly.
"""

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelwright.core.config import merge
from modelwright.core.resources import num_usable_cores
from modelwright.ops.matmul import is_emulated
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, Runner, Tuning, best_value, run_experiment, tune, with_value
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.large_runs import NO_ONEDNN, baseline_conditions, onednn_is_exact
from modelwright_claims.netns import missing
from modelwright_claims.statistics import Estimate, differences, ratios
from modelwright_claims.training_run import Processes, Run
from modelwright_claims.workbench import Size, real_token_share

MBIT = 100.0
PUBLISHED, ONE_HOST_GOAL = 20.0, 5.0
TUNING_SEEDS, SEEDS = (4000, 4010), (4001, 4002, 4003)
"""The plain loop is tuned by its mean loss over all of the first, the other arms on the first of them."""
RATES = (2e-3, 4e-3, 8e-3)
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.25, 0.18, 0.125)
"""Fractions of the plain loop's steps that an arm is tried with, until it no longer reaches its loss; then the middle
between the last two."""
PLAIN, PLAIN_BY_ONEDNN, FULL = "plain", "plain, products by oneDNN", "everything"
WIDE, NO_NETWORK = ", wide", "two hosts were not compared"
MARGIN = 0.01
"""Nats below the plain loop's loss that fewer steps must reach on the tuning seed: others may do a little worse."""
EXACT_SUMS = "+ Muon"
"""On two hosts, everything but INT8 local steps."""
NUM_HOSTS = {"one host": 1, "two hosts": 2}
GOALS = {"one host": ONE_HOST_GOAL, "two hosts": PUBLISHED}
SCENES = tuple(f"{hosts}{width}" for width in ("", WIDE) for hosts in GOALS)
"""What a record may have; those of a wider model are not measured any more."""
BASE, BF16 = "own loop and operators", "BF16"
INGREDIENTS: dict[str, dict[str, Any]] = {
    BASE: {"loop": "modelwright"},
    "packing": {"mode": "best_fit"},
    BF16: {
        "settings": {"precision": {"policy": "bf16_mixed", "output_dtype": "bf16", "overrides": {"embedding": "bf16"}}}
    },
    "Muon": {"settings": {"optimizer": "muon"}},
    "INT8 local steps": {"settings": {"gradient_sync": {"kind": "int8", "local_sgd": {"sync_every_steps": 20}}}},
    "sparse rows": {
        "settings": {
            "batch_selection": {
                "signal": "loss",
                "keep_fraction": 1 / 3,
                "random_fraction": 0.2,
                "dense_fraction": 0.03,
            }
        }
    },
    "adaptive precision": {
        "settings": {"precision": {"adaptive": {"kind": "rules", "decide_every_steps": 50, "measure_steps": 4}}}
    },
}
"""The changes of each ingredient to a run. Adaptive precision begins with the formats of the arm to which it is added.
"""
STACKS = {"one host": (BASE, "packing", BF16, "Muon"), "two hosts": (BASE, "packing", BF16, "Muon", "INT8 local steps")}
"""The ingredients that the whole stack adds to the plain loop, in order. The others need our own loop."""
ON_TOP = {"one host": ("sparse rows", "adaptive precision"), "two hosts": ()}
"""Ingredients that are tried in addition to the whole stack."""


Arms = dict[str, Run]


def scenes(*, quick: bool) -> dict[str, Arms]:
    """The arms that are compared in each scene; in quick mode a short sketch.

    A first measurement of all arms on two hosts, and of a model twice as wide, took 75 minutes.
    """
    size = Size(model_dim=128, num_layers=4, seq_len=128, batch_rows=16, num_steps=240)
    if quick:
        size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=60)
    found = {where: arms_of(where, size) for where in STACKS}
    ends = {PLAIN, PLAIN_BY_ONEDNN, FULL}
    shown = {"one host": ends if quick else set(found["one host"]), "two hosts": ends if quick else ends | {EXACT_SUMS}}
    return {where: {name: arm for name, arm in arms.items() if name in shown[where]} for where, arms in found.items()}


def ingredients_of(where: str) -> list[str]:
    """Return the ingredients of a whole stack: BF16 only where the processor has instructions for it."""
    has_bf16 = not is_emulated(torch.bfloat16, torch.device("cpu"))
    return [name for name in STACKS[where] if name != BF16 or has_bf16]


def arms_of(where: str, size: Size) -> Arms:
    """Return the plain arms, ingredients added one by one, everything, everything without each, and the stack with
    more on top.
    """
    plain = Run(size=size, loop="plain", mode="one_per_row", processes=Processes(hosts=NUM_HOSTS[where]))
    names = ingredients_of(where)
    arms = {PLAIN: plain}
    if onednn_is_exact():
        arms[PLAIN_BY_ONEDNN] = replace(plain, settings={"precision": {"fp32_matmul": "onednn"}})
    arms |= {f"+ {name}": _with_all(plain, names[:number]) for number, name in enumerate(names[:-1], start=1)}
    arms[FULL] = _with_all(plain, names)
    for left_out in names[1:]:
        arms[f"without {left_out}"] = _with_all(plain, [name for name in names if name != left_out])
    arms |= {f"{FULL} + {name}": _with_all(arms[FULL], [name]) for name in ON_TOP[where]}
    return {name: arm for number, (name, arm) in enumerate(arms.items()) if arm not in list(arms.values())[:number]}


def _with_all(arm: Run, names: Sequence[str]) -> Run:
    for name in names:
        changes = dict(INGREDIENTS[name])
        arm = replace(arm, settings=merge(arm.settings, changes.pop("settings", {})), **changes)
    return arm


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """An arm's own rate and steps, and its validation loss there."""

    size: Size
    loss: float


def measure(setting: Setting) -> Measurement:
    """All scenes, tuned and then timed; two hosts only where networks can be made."""
    every = scenes(quick=setting.quick)
    compared = {name: arms for name, arms in every.items() if arms[PLAIN].processes.hosts == 1 or not missing()}
    tuned = {name: tune_arms(setting, arms) for name, arms in compared.items()}
    result = {name: time_arms(setting, arms, tuned[name]) for name, arms in compared.items()}
    return measurement(result, tuned, compared)


def tune_arms(setting: Setting, arms: Mapping[str, Run]) -> dict[str, Tuned]:
    """Find the best rate of the plain loop at all steps; of every other arm the fewest steps that reach its loss.

    Whose products the plain loop takes does not matter to its loss: it is tuned once.
    """
    if PLAIN_BY_ONEDNN in arms:
        tuned = tune_arms(setting, {name: arm for name, arm in arms.items() if name != PLAIN_BY_ONEDNN})
        return {name: tuned[PLAIN if name == PLAIN_BY_ONEDNN else name] for name in arms}
    runner, cores = Runner(setting), num_usable_cores()
    arms = {name: _to_tune(_with_equal_tokens(setting, arm)) for name, arm in arms.items()}
    others = {name: arm for name, arm in arms.items() if name != PLAIN}
    rates = RATES[1:2] if setting.quick else RATES
    seeds = TUNING_SEEDS[:1] if setting.quick else TUNING_SEEDS
    plain = tune(runner, {PLAIN: arms[PLAIN]}, Tuning(values=rates, seeds=seeds), at_once=cores)
    result = plain | tune(runner, others, Tuning(values=rates, seeds=seeds[:1]), at_once=cores)
    best = {name: with_value(arm, "learning_rate", best_value(result[name])) for name, arm in arms.items()}
    tuned = {name: Tuned(size=arm.size, loss=min(result[name].values())) for name, arm in best.items()}
    enough = tuned[PLAIN].loss - MARGIN
    shares = SHARES[:2] if setting.quick else SHARES
    can_be_shorter = [name for name in others if tuned[name].loss <= enough]
    with ThreadPoolExecutor(cores) as pool:
        shorter = pool.map(lambda name: _fewest_steps(runner, best[name], tuned[name], enough, shares), can_be_shorter)
        return tuned | dict(zip(can_be_shorter, shorter, strict=True))


def _fewest_steps(runner: Runner, arm: Run, all_steps: Tuned, enough: float, shares: Sequence[float]) -> Tuned:
    """Return the fewest steps at which the arm's loss is `enough`, at its rate with more of them or at twice that."""

    def attempt(share: float) -> Tuned | None:
        num_steps = _whole_periods(round(share * all_steps.size.num_steps), arm)
        for factor in (1.0, 2.0):
            size = replace(best.size, num_steps=num_steps, learning_rate=factor * best.size.learning_rate)
            (outcome,) = runner.all([replace(arm, size=size, seed=TUNING_SEEDS[0], heldout="validation")])
            if outcome.final_loss <= enough:
                return Tuned(size=size, loss=outcome.final_loss)
        return None

    best, reached = all_steps, 1.0
    for share in shares[1:]:
        if (shorter := attempt(share)) is None:
            return attempt((share + reached) / 2) or best
        best, reached = shorter, share
    return best


def _to_tune(arm: Run) -> Run:
    """Return the run that an arm is tuned by.

    The number of hosts matters to a loss only where they do not sum gradients exactly, and the rate of their links, or
    the machine, not at all: one process, or two that no link slows down, each with one thread.
    """
    hosts = arm.processes.hosts if "gradient_sync" in arm.settings else 1
    return replace(arm, processes=Processes(hosts=hosts, threads=1))


def _with_equal_tokens(setting: Setting, arm: Run) -> Run:
    """Return an arm whose batches hold as many real tokens as packed ones, in multiples of two rows."""
    if arm.mode == "best_fit":
        return arm
    packed, padded = (real_token_share(setting, arm.size, mode=mode) for mode in ("best_fit", "one_per_row"))
    return replace(arm, size=replace(arm.size, batch_rows=2 * max(1, round(arm.size.batch_rows * packed / padded / 2))))


def _whole_periods(num_steps: int, arm: Run) -> int:
    """Local steps end with a meeting in any case; a run of whole periods wastes none."""
    every = arm.settings.get("gradient_sync", {}).get("local_sgd", {}).get("sync_every_steps", 1)
    return max(every, num_steps // every * every)


def time_arms(
    setting: Setting, arms: Mapping[str, Run], tuned: Mapping[str, Tuned]
) -> dict[str, list[dict[str, float]]]:
    """Return the seconds and the held-out loss of each tuned arm by seed.

    Each of several hosts has one process of one thread; a single host's process has all cores.
    """
    variants = {}
    for name, arm in arms.items():
        hosts = arm.processes.hosts
        several = Processes(hosts=hosts, threads=1, mbit=MBIT)
        processes = several if hosts > 1 else Processes(threads=num_usable_cores())
        variants[name] = replace(arm, size=tuned[name].size, processes=processes)
    seeds = SEEDS[:1] if setting.quick else SEEDS
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds, timed=True))
    return {
        name: [{"seconds": one.seconds, "heldout_loss": one.heldout_loss} for one in of]
        for name, of in samples.runs.items()
    }


def measurement(
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]],
    tuned: Mapping[str, Mapping[str, Tuned]],
    compared: Mapping[str, Mapping[str, Run]],
) -> Measurement:
    """Return seconds, losses and steps of every arm in every scene."""
    samples: dict[str, Sequence[float]] = {}
    for where, arms in found.items():
        for name, runs in arms.items():
            samples[f"{where}: seconds, {name}"] = [run["seconds"] for run in runs]
            samples[f"{where}: held-out loss, {name}"] = [run["heldout_loss"] for run in runs]
            samples[f"{where}: steps, {name}"] = [tuned[where][name].size.num_steps]
    plain = {name: arms[PLAIN] for name, arms in compared.items()}
    size, *_ = (run.size for run in plain.values())
    widths = {name: run.size.describe()["parameters"] for name, run in plain.items() if run.size != size}
    alone = all(run.processes.hosts == 1 for run in plain.values())
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | {f"parameters, {name}": parameters for name, parameters in widths.items()}
        | {
            "hosts": f"network namespaces joined by {MBIT:g} Mbit/s, one process of one thread each; one host: "
            f"{num_usable_cores()} cores",
            "batch": f"as many real tokens as {size.batch_rows} packed rows of {size.seq_len}",
            "tuned": f"the plain loop by its mean loss over seeds {', '.join(map(str, TUNING_SEEDS))}, other arms on "
            "the first, on a held-out split that is not reported",
            "rates tried": ", ".join(f"{rate:g}" for rate in RATES) + ", and beyond where the best was at an end",
            **_arms_in_words(tuned),
            "time": "of all training steps; preparation, start and evaluation are left out on both sides; all arms of "
            "a seed one after the other, seeds perhaps in several calls of the same sources on this machine",
            **({NO_NETWORK: missing()} if alone else {}),
            **baseline_conditions(),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """The baseline is the fastest plain loop: by PyTorch's products or by oneDNN's, and for two hosts also on one."""
    judgment = Judgment()
    scenes = [where for where in SCENES if f"{where}: seconds, {PLAIN}" in samples]
    for where in scenes:
        goal, rival = GOALS[where.removesuffix(WIDE)], "the plain loop"

        def faster(place: str, name: str, arm: str = FULL, where: str = where) -> Estimate:
            return ratios(samples[f"{place}: seconds, {name}"], samples[f"{where}: seconds, {arm}"])

        def loss_above(place: str, name: str, arm: str = FULL, where: str = where) -> Estimate:
            return differences(samples[f"{where}: held-out loss, {arm}"], samples[f"{place}: held-out loss, {name}"])

        for arm in names_between(samples, f"{where}: seconds, "):
            if arm != PLAIN:
                judgment.ask(f"{where}: faster, {arm}", faster(where, PLAIN, arm), "x")
                judgment.ask(f"{where}: held-out loss above plain, {arm}", loss_above(where, PLAIN, arm), "nats")
            judgment.show(samples, [f"{where}: steps, {arm}"])
        own, gap = faster(where, PLAIN), loss_above(where, PLAIN)
        say = f"{where}: {{0.mean:.1f}}x {rival}, held-out loss {gap.mean:+.3f} nats"
        judgment.ask("", own, "x", ">=", goal, what=f"{where}: speed over {rival}", say=say)
        judgment.ask("", gap, "nats", "<=", 0.0, what=f"{where}: held-out loss above {rival}'s")
        with judgment.part():
            hosts, wide = where.removesuffix(WIDE), WIDE if where.endswith(WIDE) else ""
            # Two hosts have to beat one of them alone, too.
            places = [where] if NUM_HOSTS[hosts] == 1 else [where, f"one host{wide}"]
            names = [PLAIN] if NO_ONEDNN in conditions else [PLAIN, PLAIN_BY_ONEDNN]
            plain = {(place, name): samples[f"{place}: seconds, {name}"] for place in places for name in names}
            fastest = min(plain, key=lambda arm, plain=plain: statistics.fmean(plain[arm]))
            name = f"{where}: faster than the fastest plain loop"
            if fastest == (where, PLAIN):
                judgment.ask(name, own, "x")
            else:
                rival = f"the fastest plain loop ({fastest[1]}, {fastest[0]})"
                what = f"{where}: speed over {rival}"
                judgment.ask(name, faster(*fastest), "x", ">=", goal, what=what, say=f"{{0.mean:.1f}}x {rival}")
                above = loss_above(*fastest)
                judgment.ask("", above, "nats", "<=", 0.0, what=f"{where}: held-out loss above {rival}")
    if not any(NUM_HOSTS[where.removesuffix(WIDE)] > 1 for where in scenes):
        judgment.lacking.append(f"two hosts: {conditions[NO_NETWORK]}")
    return judgment.verdict()


def _arms_in_words(tuned: Mapping[str, Mapping[str, Tuned]]) -> dict[str, str]:
    """Return the parts of the whole stack, the chosen rates, and the arms that never reach the plain loop's loss."""
    rates, beyond = [], []
    for where, arms in tuned.items():
        rates.append(f"{where}: {', '.join(f'{name} {one.size.learning_rate:g}' for name, one in arms.items())}")
        beyond += [f"{where}: {name}" for name, one in arms.items() if one.loss > arms[PLAIN].loss]
    everything = {where: ", ".join(ingredients_of(where)) for where in STACKS}
    return {
        "everything": "; ".join(f"{name}: {ingredients}" for name, ingredients in everything.items()),
        "rates": "; ".join(rates),
        "all steps and still not the plain loop's loss": "; ".join(beyond) or "none",
    }


CLAIM = declared(__name__)
