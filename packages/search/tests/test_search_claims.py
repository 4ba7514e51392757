"""The claim about the search for a shape: its rule."""

from claim_verdicts import verdict
from modelwright_search.claims import architecture_search


def test_the_searched_shape_is_judged_on_unseen_seeds() -> None:
    searched, unseen = architecture_search.SEARCHED, architecture_search.UNSEEN
    samples = {f"{searched}tpe": [2.0], f"{unseen}tpe": [2.0, 2.01, 2.0]}
    samples |= {f"{unseen}{rival}": [2.1, 2.11, 2.1] for rival in architecture_search.RIVALS}
    samples |= {architecture_search.PROMISED: [10.0], architecture_search.MEASURED: [10.5, 10.4, 10.6]}
    samples |= {architecture_search.BUDGET: [5.0]}
    names = (architecture_search.SEARCHING, "random", "halving", "scaled")
    samples |= {architecture_search.SPENT + name: [5.0] for name in names}
    assert verdict(architecture_search.CLAIM, samples).kind == "met"
    slow = {**samples, architecture_search.MEASURED: [11.5, 11.4, 11.6]}
    assert "latency beside the promise 15%" in verdict(architecture_search.CLAIM, slow).reason
    once = {**samples, architecture_search.MEASURED: [10.5]}
    assert verdict(architecture_search.CLAIM, once).kind == "not judged", "one measurement gives no bound"
    dear = {**samples, architecture_search.SPENT + "tpe": [5.5]}
    assert "tpe spent 5.500 trainings of 5" in verdict(architecture_search.CLAIM, dear).reason
    for rival in ("random", "halving"):
        early = verdict(architecture_search.CLAIM, {**samples, architecture_search.SPENT + rival: [3.9]})
        assert early.kind == "short"
        assert f"{rival} spent 3.90 trainings of 5" in early.reason
    assert "not at an equal budget" not in verdict(architecture_search.CLAIM, samples).reason
    few_shapes = verdict(architecture_search.CLAIM, {**samples, architecture_search.SPENT + "scaled": [3.9]})
    assert few_shapes.kind == "met"
    assert "not at an equal budget: scaled spent 3.90 trainings of 5, for it had no further shape" in few_shapes.reason
    tied = {**samples, f"{unseen}halving": [2.0, 2.01, 2.0]}
    assert "loss above halving" in verdict(architecture_search.CLAIM, tied).reason
