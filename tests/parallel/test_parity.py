"""Every layout is one and the same training: losses, gradient norms and final weights against a single process.

In float64 with the definition of the loss, where a wrong gradient cannot hide behind rounding, and in the formats that
people train in, with the fused loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from distributed import OnDemand, run_distributed
from modelwright.core.records import column, read_records
from parallel.parity_run import Case, run_case, run_cases
from tolerances import TOLERANCES

EXACT = {"rtol": 1e-10, "atol": 1e-12}
TRAINED = TOLERANCES["fp32_trained"]
METRICS = ("loss", "heldout_loss", "grad_norm", "num_tokens")


ONCE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
"""Evaluation and a checkpoint at the end only."""


def exact(name, layout, **more) -> Case:
    return Case(name=name, layout=layout, compute="fp64", steps=3, microbatches=2, settings=ONCE, **more)


def practical(name, layout, **more) -> Case:
    unit = {"mode": "full", "layers_per_segment": 1}
    settings = ONCE | {"learning_rate": 2e-3}
    return Case(name=name, layout=layout, steps=4, microbatches=2, activation=unit, settings=settings, **more)


UNTIED = {"tie_embeddings": False}
ODD = {"vocab_size": 67}
TWO = [
    exact("tensor2", {"tensor": 2}),
    exact("tensor2-whole-residual", {"tensor": 2, "sequence_parallel": False}),
    exact("tensor2-untied", {"tensor": 2}, shape=UNTIED),
    exact("context2", {"context": 2}),
    exact("context2-ring", {"context": 2, "context_attention": "ring"}),
    *(
        exact(f"shard2-{what}", {"zero_stage": stage})
        for stage, what in enumerate(("optimizer", "gradients", "full"), 1)
    ),
    practical("fp32-tensor2-odd", {"tensor": 2}, shape=ODD),
    practical("fp32-context2", {"context": 2}),
    practical("bf16-tensor2", {"tensor": 2}, compute="bf16"),
    practical("bf16-context2", {"context": 2}, compute="bf16"),
    practical("bf16-context2-ring", {"context": 2, "context_attention": "ring"}, compute="bf16"),
]
FOUR = [
    exact("tensor4-of-two-kv-heads", {"tensor": 4}),
    exact("context4", {"context": 4}),
    exact("context4-ring", {"context": 4, "context_attention": "ring"}),
    exact("context2-tensor2", {"context": 2, "tensor": 2}),
    exact("data2-tensor2", {"tensor": 2}),
    exact("data2-tensor2-full-odd", {"tensor": 2, "zero_stage": 3}, shape=ODD | UNTIED),
    exact("context2-full", {"context": 2, "zero_stage": 3}),
    exact("hybrid", {"zero_stage": 3, "shard_group_size": 2}),
    exact("shard4-full", {"zero_stage": 3}),
    practical("fp32-data2-tensor2-full", {"tensor": 2, "zero_stage": 3}),
    practical("bf16-data2-tensor2-full", {"tensor": 2, "zero_stage": 3}, compute="bf16"),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same training in this process, once for all layouts that it is compared with."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("single")

    @cache
    def run(key: str):
        case = next(case for case in TWO + FOUR if case.name == key)
        return folder / key, run_case(replace(case, layout={}), folder)

    def of(case: Case, **changes):
        twin = next(c for c in TWO + FOUR if replace(c, name="", layout={}) == replace(case, name="", layout={}))
        if changes:
            return run_case(replace(twin, layout={}, name=f"{twin.name}-changed", **changes), folder)
        return run(twin.name)

    return of


Ranks = OnDemand[Case, tuple[Path, list[dict[str, dict[str, torch.Tensor]]]]]
"""The folder of a group's runs, and the final weights by rank and case."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")

    def run(group: Sequence[Case]):
        return folder, run_distributed(run_cases, 2 if group[0] in TWO else 4, folder, group)

    return OnDemand([TWO[:6], TWO[6:], FOUR[:4], FOUR[4:8], FOUR[8:]], run)


def weights_of(ranks: Ranks, case: Case) -> dict[str, torch.Tensor]:
    """The whole final weights, after a check that all ranks left with the same ones."""
    first, *others = [weights[case.name] for weights in ranks[case][1]]
    assert len(others) == (1 if case in TWO else 3)
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in first.items())
    return first


def metric(folder: Path, name: str) -> torch.Tensor:
    return torch.tensor(
        [value for _, value in column(read_records(folder / "metrics.jsonl"), name)], dtype=torch.float64
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TWO + FOUR if case.compute != "bf16"], ids=lambda case: case.name)
def test_losses_and_weights_are_those_of_one_process(single, ranks, case):
    folder, weights = single(case)
    is_exact = case.compute == "fp64"
    for name in METRICS:
        tolerance = EXACT if is_exact else TOLERANCES["fp32_loss"]
        torch.testing.assert_close(metric(ranks[case][0] / case.name, name), metric(folder, name), **tolerance)
    found = weights_of(ranks, case)
    assert set(found) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, **(EXACT if is_exact else TRAINED))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TWO + FOUR if case.compute == "bf16"], ids=lambda case: case.name)
def test_bf16_is_no_further_from_fp32_than_one_process_is(single, ranks, case):
    """A sum that is cut in two is rounded twice, so the errors differ; they must not grow."""
    folder, one = single(case)
    fp32 = single(case, compute="fp32")
    found = weights_of(ranks, case)
    torch.testing.assert_close(
        metric(ranks[case][0] / case.name, "loss"), metric(folder, "loss"), **TOLERANCES["bf16_op"], check_dtype=False
    )
    assert 0 < distance(found, fp32) < 1.5 * distance(one, fp32)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(left[name] - weight).square().sum() for name, weight in right.items()]).sum().sqrt())
