"""A technique and an objective that the package does not know: they train, are in checkpoints and resume, and the core
is told about them by arguments alone."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny_run

from modelwright.core.errors import ConfigError, Stopped
from modelwright.data.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.train.objective import Objective
from modelwright.train.technique import Technique, Update


@dataclass
class GradientNoise:
    """Adds Gaussian noise that fades (Neelakantan et al. 2015); its random stream is its state."""

    scale: float = 0.01
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def on_gradients(self, update: Update) -> None:
        for gradient in update.gradients:
            noise = torch.randn(gradient.shape, generator=self.draw)
            gradient.add_(noise, alpha=self.scale / (1 + update.step) ** 0.55)
        update.metrics["noise"] = self.scale

    def state_dict(self) -> dict[str, Any]:
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draw.set_state(state["draw"])

    def technique(self) -> Technique:
        return Technique(name="gradient_noise", on_gradients=self.on_gradients, state=self)


@dataclass
class Reweighted(Objective):
    """Weighs each row by a running mean of its past losses: a loss with a memory."""

    inner: Pretrain
    mean: float = 4.0

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return self.inner.batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Mapping[str, Tensor]:
        loss = self.inner.losses(output, batch, model)["loss"]
        if output.requires_grad:
            loss, mean = loss * self.mean, float(loss.detach()) / max(1, batch.num_targets)
            self.mean = 0.9 * self.mean + 0.1 * mean
        return {"loss": loss}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def run(folder: Path, *, stop: int = 0, noise: float = 0.01) -> dict[str, Tensor]:
    model = tiny_run.tiny_model()
    techniques = [GradientNoise(noise).technique()] if noise else []
    techniques += tiny_run.watching(stop=tiny_run.StopAfter(stop))
    tiny_run.run(folder, model=model, objective=Reweighted(Pretrain(tiny_run.Rows())), techniques=techniques)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def test_they_train_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "cut", stop=5)
    resumed = run(tmp_path / "cut")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    quiet = run(tmp_path / "quiet", noise=0.0)
    assert any(not torch.equal(weight, quiet[name]) for name, weight in whole.items())
    assert '"noise": 0.01' in (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_a_technique_that_needs_what_another_takes_away_is_refused(tmp_path: Path) -> None:
    reader = Technique(name="reader", needs=frozenset({"a quiet run"}))
    noisy = Technique(name="noisy", breaks=frozenset({"a quiet run"}))
    with pytest.raises(ConfigError, match="reader: needs a quiet run, which noisy takes away"):
        tiny_run.run(tmp_path, techniques=[noisy, reader])
