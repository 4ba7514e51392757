"""A client's part of a round: some updates on its own rows from the global weights, by the training loop.

FedAvg makes plain SGD steps, without clipping and decay, so that one step of all clients is one step on all their rows.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from modelwright.core.errors import ConfigError
from modelwright.core.rundir import StageDir
from modelwright.data.batch import TokenBatch
from modelwright.federated.aggregate import ClientUpdate
from modelwright.federated.weights import set_weights, weight_vector
from modelwright.model.decoder import Decoder
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.runtime import Runtime, TechniqueBuilder
from modelwright.train.technique import Technique, Update


@dataclass(frozen=True)
class LaterBatches:
    """A source that begins with a later batch: a round goes on where the last one ended."""

    source: BatchSource
    first: int

    @property
    def num_batches_per_epoch(self) -> int:
        return self.source.num_batches_per_epoch

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return self.source.batch(self.first + index, rank=rank, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What a client trains with."""

    model: Decoder
    source: BatchSource
    objective: Callable[[BatchSource], Objective]
    config: TrainConfig
    """`optimizer`, `learning_rate`, `batch_tokens` and so on; its length is replaced by the round's."""
    folder: Path
    """For the metrics of the round at hand."""
    seed: int = 0
    frozen: Sequence[str] = ()
    """Names of weights that come from the server and are not trained."""

    def __post_init__(self) -> None:
        if self.config.optimizer != "sgd":
            raise ConfigError(
                f"optimizer: federated averaging makes steps of sgd, not {self.config.optimizer}; set sgd"
            )

    def round(self, weights: np.ndarray, *, number: int, num_steps: int, proximal_mu: float) -> ClientUpdate:
        """Train `num_steps` steps from the global weights [N, float32] in round `number` (from 0).

        The update is of the trained weights, and counts as much as there were labels, all steps together.
        """
        set_weights(self.model, weights, self.frozen)
        before = weight_vector(self.model)
        counted: list[float] = []
        techniques: list[TechniqueBuilder] = [counted_labels(counted)]
        if proximal_mu:
            techniques.append(proximal_term(proximal_mu))
        shutil.rmtree(self.folder, ignore_errors=True)
        train(
            TrainJob(
                model=self.model,
                objective=self.objective(LaterBatches(self.source, number * num_steps)),
                config=replace(self.config, num_steps=num_steps, num_tokens=0, num_epochs=0.0, keep_best=False),
                stage=StageDir(self.folder),
                num_steps=num_steps,
                seed=self.seed,
                name=f"round {number + 1}",
                techniques=techniques,
                is_resumable=False,  # a client that comes back begins with the round that the server is in
            )
        )
        return ClientUpdate(weight_vector(self.model) - before, sum(counted))


def counted_labels(counts: list[float]) -> TechniqueBuilder:
    """Appends the normalizer of every step: how many labels its mean is over."""

    def on_gradients(update: Update) -> None:
        counts.append(sum(update.weights.values()))

    return lambda run: Technique(name="counted_labels", on_gradients=on_gradients, needs=frozenset())


def proximal_term(mu: float) -> TechniqueBuilder:
    """FedProx: adds the gradient of mu/2 times the squared distance from the weights at the start of the round."""

    def build(run: Runtime) -> Technique:
        start = {view.name: view.tensor.detach().clone() for view in run.parameters()}

        @torch.no_grad()
        def on_gradients(update: Update) -> None:
            now = {view.name: view.tensor for view in run.parameters()}
            for gradient in update.gradients:
                gradient.tensor.add_(now[gradient.name] - start[gradient.name], alpha=mu)

        return Technique(name="proximal_term", on_gradients=on_gradients, needs=frozenset())

    return build
