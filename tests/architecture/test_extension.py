"""Techniques and an objective that the package does not know: they train, are in checkpoints and resume, and the core
is told about them by arguments alone.

The techniques are written against named views, so they do the same under every layout: noise on gradients, an average
of weights. What a layout cannot give them is refused by name.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refusals import config_error

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny_run

from distributed import run_distributed, start_distributed
from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES, UNDIVIDED_GRADIENTS
from modelwright.core.config import ConfigError, Stopped
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder, Update


@dataclass
class GradientNoise:
    """Adds Gaussian noise that fades (Neelakantan et al. 2015); how far it has faded is its state."""

    scale: float = 0.01

    def __call__(self, run: Runtime) -> Technique:
        def on_gradients(update: Update) -> None:
            for view in update.gradients:
                view.tensor.add_(view.random_like(run.seed, update.step), alpha=self.scale)
            update.metrics["noise"] = self.scale
            self.scale *= 0.8

        return Technique(name="gradient_noise", on_gradients=on_gradients, state=self, needs=frozenset())

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


@dataclass
class WeightAverage:
    """An exponential moving average of the weights (Polyak and Juditsky 1992). Each rank averages its part."""

    decay: float = 0.9
    average: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    """The average at the end; under a pipeline, of this rank's stages."""

    def __call__(self, run: Runtime) -> Technique:
        self.run = run
        needs = frozenset({EQUAL_REPLICAS, SYNCHRONOUS_UPDATES})
        return Technique(name="weight_average", on_step_end=self.on_step_end, state=self, needs=needs)

    def on_step_end(self, info: StepInfo) -> None:
        for view in self.run.parameters():
            if view.name in self.average:
                self.average[view.name].lerp_(view.tensor, 1 - self.decay)
            else:
                self.average[view.name] = view.tensor.clone()
        if info.step == self.run.num_steps:
            for name, tensor in self.state_dict()["average"].items():
                self.whole[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    def state_dict(self) -> dict[str, Any]:
        views = self.run.parameters() if self.average else []
        return {"average": {view.name: view.laid_out(self.average[view.name]) for view in views}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {view.name: view.part_of(state["average"][view.name]).clone() for view in self.run.parameters()}


@dataclass
class Reweighted(Objective):
    """Weighs each row by a running mean of its past losses: a loss with a memory."""

    inner: NextToken
    mean: float = 4.0

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return self.inner.batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        loss = self.inner.losses(output, batch, model).losses["loss"]
        if output.requires_grad:
            loss, mean = loss * self.mean, float(loss.detach()) / max(1, batch.num_targets)
            self.mean = 0.9 * self.mean + 0.1 * mean
        return Terms({"loss": loss})

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def run(folder: Path, *, stop: int = 0, noise: float = 0.01) -> dict[str, Tensor]:
    model, average = tiny_run.tiny_model(), WeightAverage()
    techniques: list[TechniqueBuilder] = [GradientNoise(noise), average] if noise else []
    techniques += tiny_run.watching(stop=tiny_run.StopAfter(stop))
    tiny_run.run(folder, model=model, objective=Reweighted(NextToken(tiny_run.Rows())), techniques=techniques)
    averages = {f"average/{name}": tensor for name, tensor in average.whole.items()}
    return {name: weight.clone() for name, weight in model.state_dict().items()} | averages


@pytest.mark.slow
def test_they_train_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "cut", stop=5)
    resumed = run(tmp_path / "cut")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    quiet = run(tmp_path / "quiet", noise=0.0)
    assert any(not torch.equal(weight, whole[name]) for name, weight in quiet.items())
    assert '"noise": 0.01' in (tmp_path / "whole" / "metrics.jsonl").read_text()


SHORT = {"num_steps": 6, "checkpoint_every_steps": 2, "eval_every_steps": 0, "keep_best": False}


def trained(folder: Path, *further: TechniqueBuilder, settings: Any = (), **more: Any) -> dict[str, Tensor]:
    """Final weights and their average, trained in FP64, so that only the techniques could tell layouts apart."""
    average = WeightAverage()
    config = tiny_run.settings(**{**SHORT, **dict(settings)})
    techniques = [GradientNoise(), average, *further]
    model = tiny_run.run_in_float64(folder, config, techniques=techniques, heldout=[], **more)
    averages = {f"average/{name}": tensor for name, tensor in average.whole.items()}
    return {name: weight.clone() for name, weight in model.state_dict().items()} | averages


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {
        name: trained(folder / name, world=world, parallel=ParallelConfig(**layout))
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
    }


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare the tensors that `found` has, which may be those of one pipeline stage alone."""
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_they_do_the_same_under_every_layout(tmp_path: Path) -> None:
    """Under one copy and a pipeline the noise once differed from one process's by more than its size, in silence."""
    alone = trained(tmp_path / "alone")
    first, second = run_distributed(in_all_layouts, 2, tmp_path)
    for name in tiny_run.TWO_RANK_LAYOUTS:
        assert_close(first[name], alone)
        assert_close(second[name], alone)
        assert (first[name] | second[name]).keys() == alone.keys()


def killed(world: World, folder: Path, layout: Mapping[str, Any]) -> None:
    def die(info: StepInfo) -> None:
        if info.step == 5:  # the newest checkpoint is that of step 4, or of step 2 if it was still being written
            os.kill(os.getpid(), signal.SIGKILL)

    death = tiny_run.always(Technique(name="death", on_step_end=die, needs=frozenset()))
    trained(folder, death, world=world, parallel=ParallelConfig(**layout))


def resumed(world: World, folder: Path, layout: Mapping[str, Any]) -> dict[str, Tensor]:
    return trained(folder, world=world, parallel=ParallelConfig(**layout))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("zero 3", "tensor"), ("pipeline", "one copy")])
def test_a_killed_run_resumes_under_another_layout(before: str, after: str, tmp_path: Path) -> None:
    ended = start_distributed(killed, 2, tmp_path / "cut", tiny_run.TWO_RANK_LAYOUTS[before]).wait()
    assert {exit_.code for exit_ in ended} == {-signal.SIGKILL}
    alone = trained(tmp_path / "alone")
    for found in run_distributed(resumed, 2, tmp_path / "cut", tiny_run.TWO_RANK_LAYOUTS[after]):
        assert_close(found, alone)


@dataclass
class LargestRow:
    """Scales each matrix's gradient by its largest row norm: it needs whole matrices and says so."""

    def __call__(self, run: Runtime) -> Technique:
        def on_gradients(update: Update) -> None:
            for view in update.gradients:
                assert view.is_whole
                if view.tensor.dim() == 2:
                    view.tensor.div_(1 + view.tensor.norm(dim=1).max())

        return Technique(name="largest_row", on_gradients=on_gradients, needs=frozenset({UNDIVIDED_GRADIENTS}))


def needing_whole_gradients(world: World, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under the default layout, and the refusals of the others."""
    weights = trained(folder / "default", LargestRow(), world=world)
    refusals = []
    for name in ("zero 3", "tensor", "pipeline"):
        with pytest.raises(ConfigError) as refused:
            trained(
                folder / name, LargestRow(), world=world, parallel=ParallelConfig(**tiny_run.TWO_RANK_LAYOUTS[name])
            )
        refusals.append(str(refused.value))
    return weights, refusals


@pytest.mark.slow
def test_what_a_technique_needs_chooses_the_strategy_or_refuses_the_layout(tmp_path: Path) -> None:
    """By default two processes keep one copy and divide the gradients; with this technique they keep copies."""
    alone = trained(tmp_path / "alone", LargestRow())
    for weights, refusals in run_distributed(needing_whole_gradients, 2, tmp_path):
        assert_close(weights, alone)
        for text, setting in zip(refusals, ("zero_stage 3", "tensor 2", "pipeline 2"), strict=True):
            assert text.startswith(f"largest_row: needs {UNDIVIDED_GRADIENTS}, which parallel.{setting} takes away")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_sync": {"local_sgd": {"sync_every_steps": 2}}}, "weight_average: needs equal weights"),
        ({"async_updates": {"mode": "hogwild"}}, "weight_average: needs updates that all ranks make together"),
        ({"optimizer_in_backward": True}, "gradient_noise: needs whole gradients after backward"),
    ],
)
def test_settings_that_take_away_what_they_need_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, settings=settings)


def test_a_technique_that_needs_what_another_takes_away_is_refused(tmp_path: Path) -> None:
    reader = tiny_run.always(Technique(name="reader", needs=frozenset({"a quiet run"})))
    noisy = tiny_run.always(Technique(name="noisy", breaks=frozenset({"a quiet run"}), needs=frozenset()))
    with config_error("reader"):
        tiny_run.run(tmp_path, techniques=[noisy, reader])
