"""Claim: a search finds a better shape than random draws, successive halving and scaling at the same budget.

One search as by `modelwright search`: every strategy may spend as much training as the others, under the latency and
the parameters of the run's own model. Each strategy's best candidate is then trained with three seeds that no strategy
has seen. Earlier records compare a supernet, too, which the package no longer has, and their successive halving was
synchronous.
"""

import math
from collections.abc import Mapping
from typing import Any

from modelwright.core.progress import SilentProgress
from modelwright.recipes.load import load
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import estimate, percent_above
from modelwright_search.config import SearchConfig
from modelwright_search.result import PROMISE_MARGIN, Contender, SearchResult
from modelwright_search.run import search
from modelwright_search.workbench import TOLERANCE

SEARCHING = "tpe"
RIVALS = ("random", "halving", "scaled", "standard")
"""At the same budget; `standard`, the run's own shape, is one training."""
DRAWING = ("random", "halving")
"""Rivals that can always try another candidate."""
LEAST_SPENT = 0.8
"""Share of the budget that a rival has spent at least where it counts as one at an equal budget: a candidate costs up
to one of five trainings, and none is cut short."""
NUM_UNSEEN = 3
SEARCHED, UNSEEN, SPENT, BUDGET = "loss in the search, ", "loss on unseen seeds, ", "spent, ", "budget"
PROMISED, MEASURED = "promised ms a token", "measured ms a token"
EARLIER = (
    "at commit f30cc0b2e284 the better one of TPE and a supernet was judged, beside synchronous successive halving: "
    "short, the supernet's shape 6.39% above that of halving"
)
"""For the conditions of a record: the comparison was changed after this result."""


def measure(setting: Setting) -> Measurement:
    wish = SearchConfig(
        budget=2.0 if setting.quick else 5.0,
        num_steps=4 if setting.quick else 150,
        strategies=(SEARCHING, "random", "halving", "scaled"),
        num_repetitions=NUM_UNSEEN,
    )
    request = load("continual-demo", settings(setting), str(setting.folder / "search"))
    words = ["search", "continual-demo"]
    result = search(request.config, request.run, wish, words=words, progress=SilentProgress(), restart=False)
    samples, winner = samples_of(result), result.winner
    assert winner.best is not None
    shape = winner.bench.space.candidate(winner.best.choices).model
    samples[MEASURED] += [winner.bench.candidates.measure(shape) for _ in range(2)]
    return Measurement(samples=samples, conditions=conditions_of(result, wish))


def settings(setting: Setting) -> Mapping[str, Any]:
    shape = {"vocab_size": 1024, "num_layers": 3, "model_dim": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 352}
    if setting.quick:
        shape = {**shape, "num_layers": 2, "model_dim": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 176}
    return {
        "name": "search",
        "stages": ["clean", "tokenize", "pack", "pretrain"],
        "data": {"stdlib_fraction": 0.06 if setting.quick else 0.5},
        "tokenizer": {"vocab_size": shape["vocab_size"]},
        "model": shape,
    }


def samples_of(result: SearchResult) -> dict[str, list[float]]:
    samples = {PROMISED: [result.promise.promised_ms], MEASURED: [result.promise.measured_ms], BUDGET: [result.budget]}
    for contender in result.contenders:
        samples |= _samples_of(contender)
    return samples


def _samples_of(contender: Contender) -> dict[str, list[float]]:
    """A training that failed has an infinite loss; a strategy that has trained nothing is without losses."""
    name, losses = contender.bench.strategy, [math.inf if loss is None else loss for loss in contender.losses]
    spent = {SPENT + name: [contender.bench.spent]}
    return spent | ({SEARCHED + name: losses[:1], UNSEEN + name: losses[1:]} if losses else {})


def conditions_of(result: SearchResult, wish: SearchConfig) -> Conditions:
    shapes = {one.bench.strategy: one.best.choices for one in result.contenders if one.best is not None}
    return {
        "budget of each strategy": f"{wish.budget:g} trainings of the run's own model",
        "steps of a training": wish.num_steps,
        "limit of latency": f"{result.limits.latency_ms:.3f} ms a token, the run's own model's",
        "limit of parameters": result.limits.num_parameters,
        "winner": result.winner.bench.strategy,
        "text": "documentation and code of the interpreter's libraries",
        "promise": "of the winner over all seeds, measured again in a fresh engine",
        "earlier comparison": EARLIER,
        **{f"shape, {name}": ", ".join(f"{key} {value}" for key, value in of.items()) for name, of in shapes.items()},
    }


def _spent_enough(samples: Samples, rival: str) -> tuple[bool, str]:
    """Return whether a rival spent `LEAST_SPENT` of the budget, and what to say if it did not."""
    (spent,), (budget,) = samples[SPENT + rival], samples[BUDGET]
    return spent >= LEAST_SPENT * budget, f"{rival} spent {spent:.2f} trainings of {budget:g}"


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """`scaled` ends when its shapes are exhausted; the reason says so where it left much of its budget."""
    judgment = Judgment()
    for rival in RIVALS:
        judgment.ask(
            f"loss of the searched shape above that of {rival}",
            lambda rival=rival: percent_above(samples[UNSEEN + SEARCHING], samples[UNSEEN + rival]), "%", "<", 0.0,
            what=f"loss above {rival}", say="{0.mean:+.2f}% beside " + rival,
        )  # fmt: skip
    with judgment.part():
        (spent,), (budget,) = samples[SPENT + SEARCHING], samples[BUDGET]
        judgment.require(spent <= budget + TOLERANCE, f"{SEARCHING} spent {spent:.3f} trainings of {budget:g}")
    for name in DRAWING:
        with judgment.part():
            judgment.require(*_spent_enough(samples, name))
    with judgment.part():
        is_enough, text = _spent_enough(samples, "scaled")
        if not is_enough:
            judgment.said.append(f"not at an equal budget: {text}, for it had no further shape")
    with judgment.part():
        (promised,) = samples[PROMISED]
        gaps = [100 * abs(measured / promised - 1) for measured in samples[MEASURED]]
        say = f"searched by {SEARCHING}; latency {{0.mean:.1f}}% beside the promise"
        judgment.ask("latency beside the promise", estimate(gaps), "%", "<=", 100 * PROMISE_MARGIN, say=say)
    for name in (SEARCHING, *RIVALS):
        judgment.show(samples, {f"held-out loss on unseen seeds, {name}": UNSEEN + name}, "nats")
        judgment.show(samples, [SPENT + name], "trainings")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="A search finds a better shape than random draws, successive halving and the standard shape scaled, at "
    "the same budget.",
    source="Yu et al., BigNAS, ECCV 2020 (arXiv:2003.11142); Li and Talwalkar, Random Search and Reproducibility for "
    "Neural Architecture Search, UAI 2019 (arXiv:1902.07638)",
    published="direction, no figure for language models; 2019: random search with early stopping is as good as weight "
    "sharing",
    compared="TPE against random draws, asynchronous successive halving of random draws, the standard shape scaled and "
    "as it is, at an equal budget; three seeds that no strategy has seen",
    target=f"a lower held-out loss than each of them on {NUM_UNSEEN} unseen seeds, random draws and halving having "
    f"spent at least {100 * LEAST_SPENT:.0f}% of the budget, and the winner's latency within "
    f"{100 * PROMISE_MARGIN:.0f}% of the promise",
    headline=(*(f"loss of the searched shape above that of {rival}" for rival in RIVALS), "latency beside the promise"),
)
