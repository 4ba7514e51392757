"""What model types add to the decoder trains under every layout to the losses and weights of one process, in float64,
or is refused by the name of the setting.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import OnDemand, RankError, run_distributed
from modelwright.core.records import column, read_records
from modelwright.model.decoder import AttentionConfig, FeedForwardConfig, NormConfig
from modelwright.ops.rope_norm_swiglu import RopeScaling
from parallel.parity_run import Case, run_case, run_cases

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ONCE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
SLIDING = {"window": 5, "window_layers": (0, 2)}
TYPES: dict[str, dict[str, Any]] = {
    "biases": {
        "attention": AttentionConfig(qkv_bias=True, output_bias=True),
        "feed_forward": FeedForwardConfig(bias=True),
        "qk_norm": False,
    },
    "gemma2": {
        "attention": AttentionConfig(query_scale=0.3, soft_cap=2.0, **SLIDING),
        "norms": NormConfig(post_norms=True, one_plus_weight=True),
        "feed_forward": FeedForwardConfig(activation="gelu_tanh"),
        "embedding_scale": 5.0,
        "logit_soft_cap": 3.0,
    },
    "gemma3": {
        "attention": AttentionConfig(**SLIDING),
        "window_rope_theta": 100.0,
        "norms": NormConfig(post_norms=True, one_plus_weight=True),
        "num_kv_heads": 1,
    },
    "phi3": {
        "rope": RopeScaling(
            kind="longrope", factor=4.0, original_max_len=12, short_factor=(1.0, 1.1), long_factor=(2.0, 4.0)
        ),
        "rotary_dim": 4,
    },
    "smollm3": {"attention": AttentionConfig(layers_without_rope=(1,)), "tie_embeddings": False},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data2": {},
    "zero3": {"zero_stage": 3},
    "tensor2": {"tensor": 2},
    "tensor2-whole-residual": {"tensor": 2, "sequence_parallel": False},
    "pipeline2": {"pipeline": 2},
    "zero-bubble": {"pipeline": 2, "schedule": "zero_bubble"},
    "context2": {"context": 2},
}
REFUSED = {("phi3", "context2")}
ONLY_FOR = {"tensor2-whole-residual": ("biases", "gemma3"), "zero-bubble": ("biases", "smollm3")}
"""Layouts that differ from others in what these types have."""
UNITS = {"mode": "full", "layers_per_segment": 2}


def case(kind: str, layout: str) -> Case:
    """Three layers; blocks of other layouts than zero_bubble are recomputed, two at a time."""
    recomputed = {"activation": UNITS} if layout in ("data2", "zero3") else {}
    return Case(
        name=f"{kind}-{layout}",
        layout=LAYOUTS[layout],
        shape={"num_layers": 3, **TYPES[kind]},
        compute="fp64",
        steps=2,
        microbatches=2,
        settings=ONCE,
        **recomputed,
    )


CASES = [
    case(kind, layout)
    for kind in TYPES
    for layout in LAYOUTS
    if (kind, layout) not in REFUSED and kind in ONLY_FOR.get(layout, TYPES)
]


Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> OnDemand[str, tuple[Path, Weights]]:
    """The final weights of each type in this process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("single")

    def run(group: Sequence[str]) -> tuple[Path, Weights]:
        alone = replace(case(group[0], "data2"), layout={}, activation={}, name=group[0])
        return folder / group[0], run_case(alone, folder)

    return OnDemand([[kind] for kind in TYPES], run)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> OnDemand[Case, tuple[Path, list[dict[str, Weights]]]]:
    """The folder of a type's runs, and the final weights by rank and case."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(group: Sequence[Case]) -> tuple[Path, list[dict[str, Weights]]]:
        return folder, run_distributed(run_cases, 2, folder, group)

    return OnDemand([[run for run in CASES if run.name.startswith(f"{kind}-")] for kind in TYPES], run)


def metric(folder: Path, name: str) -> torch.Tensor:
    values = [value for _, value in column(read_records(folder / "metrics.jsonl"), name)]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.name)
def test_losses_and_weights_are_those_of_one_process(single: Any, ranks: Any, run: Case) -> None:
    folder, weights = single[run.name.partition("-")[0]]
    for name in ("loss", "heldout_loss", "grad_norm"):
        torch.testing.assert_close(metric(ranks[run][0] / run.name, name), metric(folder, name), **EXACT)
    first, second = (found[run.name] for found in ranks[run][1])
    assert first.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, **EXACT)


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("phi3", {"context": 2}, "context: the model's rotary scaling .longrope. depends on the length"),
        ("gemma3", {"context": 2, "context_attention": "ring"}, "context_attention: ring supports neither sliding"),
        ("gemma2", {"context": 2, "context_attention": "ring"}, "context_attention: ring supports neither sliding"),
    ],
)
def test_what_a_layout_cannot_do_is_refused_by_name(tmp_path: Path, kind: str, layout: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_distributed(run_cases, 2, tmp_path, [replace(case(kind, "data2"), layout=layout, activation={})])
