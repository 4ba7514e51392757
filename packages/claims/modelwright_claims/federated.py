"""Claim: federated averaging ends near central training on the same samples, also where each client holds other
modules."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from modelwright_claims import federated_runs, training_run, workbench
from modelwright_claims.claim import Claim, Conditions, Measurement, Samples, Setting, Verdict
from modelwright_claims.experiment import MAX_EXTENSIONS, best_value, beyond, open_cache
from modelwright_claims.federated_runs import (
    CENTRAL,
    NUM_CLIENTS,
    FederatedRun,
    Method,
    Plan,
    heldout_losses,
    prepare,
    sizes,
)
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import estimate, percent_above
from modelwright_claims.workbench import Size

MOST_ABOVE: Mapping[str, float] = {"iid": 2.0, "module": 5.0}
"""Percent of the loss of central training, by how the clients' samples were dealt."""
LOSS = "held-out loss, "
METHODS: tuple[Method, ...] = get_args(Method)
RATES: Mapping[str, Sequence[float]] = {
    "iid": (0.1, 0.3, 1.0), "module": (0.1, 0.3, 1.0), "sgd": (0.1, 0.3, 1.0), "adamw": (3e-4, 1e-3, 3e-3),
}  # fmt: skip
TUNING_SEED = 100
WORDS = {
    "iid": "averaging, IID", "module": "averaging, by module", "sgd": "central, SGD", "adamw": "central, AdamW",
    "first": "before fine-tuning",
}  # fmt: skip


def plan_of(setting: Setting) -> Plan:
    if setting.quick:
        small = Size(model_dim=64, num_layers=1, seq_len=64, batch_rows=4, num_steps=40, learning_rate=3e-3)
        return Plan(model=small, num_rounds=2, local_steps=3, fraction=0.1)
    size = Size(model_dim=128, num_layers=2, seq_len=256, batch_rows=4, num_steps=400, learning_rate=3e-3)
    return Plan(model=size, num_rounds=20, local_steps=10, fraction=1.0)


def measure(setting: Setting) -> Measurement:
    plan, folder = plan_of(setting), setting.folder / "federated"
    prepare(folder, plan)
    cache = open_cache(setting, federated_runs, training_run, workbench, name="federated")

    def losses(runs: Sequence[FederatedRun]) -> list[float]:
        for run, loss in heldout_losses(folder, [run for run in runs if run not in cache]):
            cache[run] = loss
            setting.progress.note(f"{WORDS[run.method]} at {run.learning_rate:g}, seed {run.seed}: {loss:.4f}")
        return [cache[run] for run in runs]

    seeds = range(1 if setting.quick else 3)
    rates: Mapping[Method, float] = (
        {method: RATES[method][1] for method in METHODS} if setting.quick else _best_rates(plan, losses)
    )
    tuned = [
        FederatedRun(plan=plan, method=method, learning_rate=rates[method], seed=seed)
        for method in METHODS
        for seed in seeds
    ]
    samples: dict[str, list[float]] = {LOSS + method: [] for method in METHODS}
    for run, loss in zip(tuned, losses(tuned), strict=True):
        samples[LOSS + run.method].append(loss)
    untrained = FederatedRun(plan=replace(plan, num_rounds=0), method="sgd", learning_rate=0.0, seed=0)
    samples[LOSS + "first"] = [cache.get(untrained, lambda: federated_runs.first_loss(folder, untrained))]
    return Measurement(samples=samples, conditions=_conditions(plan, rates, sizes(folder), len(seeds)))


def _best_rates(plan: Plan, losses: Callable[[Sequence[FederatedRun]], list[float]]) -> dict[Method, float]:
    """The rate of each method with the lowest loss on the validation split; a grid whose best is at an edge is
    extended. losses: makes runs.
    """
    by_rate: dict[Method, dict[float, float]] = {method: {} for method in METHODS}
    missing: Mapping[Method, Sequence[float]] = {method: RATES[method] for method in METHODS}
    for _ in range(MAX_EXTENSIONS):
        runs = [
            FederatedRun(plan=plan, method=method, learning_rate=rate, seed=TUNING_SEED, heldout="validation")
            for method, rates in missing.items()
            for rate in rates
        ]
        for run, loss in zip(runs, losses(runs), strict=True):
            by_rate[run.method][run.learning_rate] = loss
        missing = {method: beyond(of_method) for method, of_method in by_rate.items()}
        if not any(missing.values()):
            break
    return {method: best_value(of_method) for method, of_method in by_rate.items()}


def _conditions(plan: Plan, rates: Mapping[Method, float], rows: Mapping[str, int], num_seeds: int) -> Conditions:
    return plan.model.describe() | {
        "clients": NUM_CLIENTS,
        "rounds": plan.num_rounds,
        "local steps": plan.local_steps,
        "samples": f"{plan.num_central_steps * plan.model.batch_rows} rows in every arm",
        "rates": ", ".join(f"{WORDS[method]} {rate:g}" for method, rate in rates.items()),
        "tuned on": "another seed and another half of the held-out modules",
        "text": "documentation of the standard library first; of PyTorch and NumPy at the clients, held out by module",
        "rows of clients": ", ".join(f"{name} {count}" for name, count in rows.items()),
        "seeds": num_seeds,
        "optimizer": "plain SGD at a constant rate at the clients; central SGD alike, AdamW with warmup and decay",
    }


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when both splits end within their margins of the better central training."""
    judgment = Judgment()
    with judgment.part():
        best = min(CENTRAL, key=lambda method: statistics.fmean(samples[LOSS + method]))
        for split, limit in MOST_ABOVE.items():
            for method in CENTRAL:
                above = percent_above(samples[LOSS + split], samples[LOSS + method])
                judgment.figures[f"loss above {WORDS[method]}, {WORDS[split]}"] = above.figure("%")
            above = percent_above(samples[LOSS + split], samples[LOSS + best])
            judgment.at_most(f"{WORDS[split]}, loss above {WORDS[best]}", above, limit, "%")
            judgment.said.append(f"{WORDS[split]} ends {above.mean:+.2f}% beside {WORDS[best]}, the better central one")
    for method in (*METHODS, "first"):
        with judgment.beside():
            judgment.figures[LOSS + WORDS[method]] = estimate(samples[LOSS + method]).figure("nats")
    return judgment.verdict()


CLAIM = Claim(
    name="federated",
    statement="Federated averaging ends near central training on as many samples, also where each client holds other "
    "modules.",
    source="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017 "
    "(arXiv:1602.05629); Zhao et al., Federated Learning with Non-IID Data, 2018 (arXiv:1806.00582)",
    published="direction: the accuracy of central training with IID samples, and less where clients hold other classes",
    compared=f"{NUM_CLIENTS} clients in Flower's simulation, samples dealt at random and by module, against central "
    "SGD and AdamW on the same rows; equal samples, each arm at its own best rate, paired seeds",
    target=f"at most {MOST_ABOVE['iid']:g}% above the loss of the better central training for samples dealt at random, "
    f"at most {MOST_ABOVE['module']:g}% by module",
    headline=tuple(f"loss above {WORDS[method]}, {WORDS[split]}" for split in MOST_ABOVE for method in CENTRAL),
    measure=measure,
    judge=judge,
)
