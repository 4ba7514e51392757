"""An objective from outside, with parameters and metrics of its own: trained, sharded, killed and resumed like ours."""

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor, nn

from distributed import run_distributed, start_distributed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import deferred_model, load_model, save_model
from modelwright.objectives.next_token import numbered_batches
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.build import attach_modules
from modelwright.train.objective import Objective, Terms, forward
from modelwright.train.technique import StepInfo, Technique


class DepthHead(nn.Module):
    """Two layers, one of them with a bias, that estimate a number from each hidden state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 8, bias=False)
        self.outer = nn.Linear(8, 1)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.outer(self.inner(hidden_BTD).tanh())[..., 0]


@dataclass
class TokensAndDepth(Objective):
    """Next tokens, and by a head of its own the logarithm of each token's position in its document."""

    metric_names = ("depth/error", "depth/first", "never")
    source: tiny_run.Rows = field(default_factory=tiny_run.Rows)
    at_batch: Callable[[], None] = lambda: None

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return {"depth": DepthHead(config.model_dim)}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in numbered_batches(self.source, first=first, rank=rank, world_size=world_size):
            self.at_batch()
            yield self.prepare(batch, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        depths_BT = (1.0 + batch.positions_BT).log().double()
        return TokenBatch(**{**vars(batch), "extras": {"depths_BT": depths_BT}})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"tokens": (batch.labels_BT != IGNORED).sum(), "depth": (batch.segments_BT >= 0).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        real_BT = batch.segments_BT >= 0
        error_BT = (model.head_output("depth", output) - batch.extras["depths_BT"]) * real_BT
        first_BT = real_BT & (batch.positions_BT == 0)
        none = torch.zeros((), dtype=torch.float64)
        losses = {"tokens": -model.token_log_probs(output, batch.labels_BT).sum(), "depth": error_BT.square().sum()}
        absolute_BT = error_BT.detach().abs()
        return Terms(
            losses,
            {
                "depth/error": (absolute_BT.sum(), real_BT.sum()),
                "depth/first": ((absolute_BT * first_BT).sum(), first_BT.sum()),
                "never": (none, none),
            },
        )


SHORT = {"num_steps": 6, "checkpoint_every_steps": 2, "eval_every_steps": 3, "keep_best": False}
MICROBATCHES = {"gradient_accumulation_steps": 2}


def trained(
    folder: Path, *further: Any, objective: TokensAndDepth | None = None, dtype: Any = torch.float64, **more: Any
) -> dict[str, Tensor]:
    """The final weights, and the metrics of each record of the run as `step, name`."""
    model, settings = tiny_run.tiny_model(dtype), {**SHORT, **more.pop("settings", {})}
    tiny_run.run(
        folder, tiny_run.settings(**settings), model=model, objective=objective or TokensAndDepth(),
        techniques=list(further), **more,
    )  # fmt: skip
    found = {name: weight.clone() for name, weight in model.state_dict().items()}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("loss", "depth/error", "depth/first", "heldout_loss", "heldout/depth/error"):
            if name in record:
                found[f"{record['step']}, {name}"] = torch.tensor(record[name], dtype=torch.float64)
    return found


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(tmp_path_factory.mktemp("alone"))


def test_its_parameters_are_trained_and_its_metrics_recorded(alone: dict[str, Tensor]) -> None:
    fresh = tiny_run.tiny_model(torch.float64)
    attach_modules(fresh, TokensAndDepth(), 1)
    before = fresh.state_dict()
    for name in ("heads.depth.inner.weight", "heads.depth.outer.bias", "blocks.0.attention.q_proj.weight"):
        assert not torch.equal(before[name], alone[name])
    batch = TokensAndDepth().prepare(tiny_run.Rows().batch(0), fresh)
    with torch.no_grad():
        error = fresh.head_output("depth", forward(fresh, batch)) - batch.extras["depths_BT"]
    real = batch.segments_BT >= 0
    torch.testing.assert_close(alone["1, depth/error"], error.abs()[real].mean())
    torch.testing.assert_close(alone["1, depth/first"], error.abs()[real & (batch.positions_BT == 0)].mean())
    assert alone["6, heldout/depth/error"] < alone["3, heldout/depth/error"]


def test_microbatches_give_the_same_weights_and_metrics(alone: dict[str, Tensor], tmp_path: Path) -> None:
    assert_close(trained(tmp_path, settings={"gradient_accumulation_steps": 4}), alone)


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {
        name: trained(folder / name, world=world, parallel=ParallelConfig(**layout), settings=MICROBATCHES)
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
    }


@pytest.mark.slow
def test_every_layout_gives_the_weights_and_metrics_of_one_process(alone: dict[str, Tensor], tmp_path: Path) -> None:
    for found in run_distributed(in_all_layouts, 2, tmp_path):
        for name in tiny_run.TWO_RANK_LAYOUTS:
            assert_close(found[name], alone)


def killed(world: World, folder: Path, layout: Mapping[str, Any]) -> None:
    def die(info: StepInfo) -> None:
        if info.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    death = tiny_run.always(Technique(name="death", on_step_end=die, needs=frozenset()))
    trained(folder, death, world=world, parallel=ParallelConfig(**layout), settings=MICROBATCHES)


def resumed(world: World, folder: Path, layout: Mapping[str, Any]) -> dict[str, Tensor]:
    return trained(folder, world=world, parallel=ParallelConfig(**layout), settings=MICROBATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("zero 3", "pipeline"), ("tensor", "copies")])
def test_a_killed_run_resumes_under_another_layout(
    before: str, after: str, alone: dict[str, Tensor], tmp_path: Path
) -> None:
    ended = start_distributed(killed, 2, tmp_path / "cut", tiny_run.TWO_RANK_LAYOUTS[before]).wait()
    assert {one.code for one in ended} == {-signal.SIGKILL}
    for found in run_distributed(resumed, 2, tmp_path / "cut", tiny_run.TWO_RANK_LAYOUTS[after]):
        assert_close(found, alone)


def killed_alone(world: World, folder: Path) -> None:
    num_batches = 0

    def count() -> None:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    trained(folder, objective=TokensAndDepth(at_batch=count), world=world, dtype=torch.float32)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks of tests have; with another number of threads sums round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    (ended,) = start_distributed(killed_alone, 1, tmp_path / "cut").wait()
    assert ended.code == -signal.SIGKILL
    found, whole = (trained(tmp_path / name, dtype=torch.float32) for name in ("cut", "whole"))
    assert found.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


def test_a_model_on_disk_gets_the_same_modules_and_exports_without_them(tmp_path: Path) -> None:
    save_model(tiny_run.tiny_model(), tmp_path / "model")
    weights = []
    for number, model in enumerate((deferred_model(tmp_path / "model"), load_model(tmp_path / "model"))):
        config = tiny_run.settings(**{**SHORT, "num_steps": 2, "eval_every_steps": 0})
        tiny_run.run(tmp_path / str(number), config, model=model, objective=TokensAndDepth())
        weights.append(model.state_dict())
        save_model(model, tmp_path / f"saved-{number}")
        assert not load_model(tmp_path / f"saved-{number}").heads
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert math.isfinite(float(weights[0]["heads.depth.outer.bias"]))


def test_metrics_that_were_not_declared_are_a_bug(tmp_path: Path) -> None:
    class Silent(TokensAndDepth):
        metric_names = ("depth/error",)

    with pytest.raises(ValueError, match="are not those that metric_names declares"):
        trained(tmp_path, objective=Silent())
