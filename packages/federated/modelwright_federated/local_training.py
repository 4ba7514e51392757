"""A client's part of a round: a few steps of the training loop on its own rows, from the global weights."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from modelwright.core.artifacts import ArtifactError, StageDir, make_folder, writing
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.model.peft_folder import save_adapter
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder, Update
from modelwright.train.techniques.learning_rate import ScheduleConfig
from modelwright_federated.config import FederatedConfig
from modelwright_federated.weights import GlobalWeights

ROUND_FOLDER = "round"
"""Folder of the current round in a client's folder; emptied before each round."""
PERSONAL, ADAPTER_FOLDER = "personal.safetensors", "adapter"
"""Files of a client's own B matrices, and of its adapter in PEFT's layout."""


@dataclass(frozen=True)
class ClientUpdate:
    """A client's result of a round. change: difference of the weights that it trains and shares [N, float32]; weight:
    number of its labels; loss: mean over its steps in nats per label, NaN if unknown.
    """

    change: np.ndarray
    weight: float
    loss: float = float("nan")

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.change.astype(np.float64)))

    def clipped(self, most: float) -> "ClientUpdate":
        """Returns the update, scaled down to a norm of `most` if it is longer."""
        norm = self.norm
        return replace(self, change=self.change * np.float32(most / norm)) if norm > most else self


@dataclass(frozen=True)
class LaterBatches:
    """A source that starts at a later batch, so that a round continues after the batches of the last one."""

    source: BatchSource
    first: int

    @property
    def num_batches_per_epoch(self) -> int:
        return self.source.num_batches_per_epoch

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return self.source.batch(self.first + index, rank=rank, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Model, data and settings of a client's training."""

    model: Decoder
    source: BatchSource
    objective: Callable[[BatchSource], Objective]
    config: FederatedConfig
    training: TrainConfig
    """Settings of a stage such as its precision; optimizer, learning rate and length come from `config`."""
    folder: Path
    """Folder of the current round's metrics and of personal weights."""
    base: str = ""
    """Model folder that personal adapters are based on, as recorded in them."""
    seed: int = 0
    weights: GlobalWeights = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", GlobalWeights(self.model, self.config.lora))

    def round(self, weights: np.ndarray, *, number: int, proximal_mu: float) -> ClientUpdate:
        """Trains from the global weights [N, float32] in round `number` (from 0)."""
        self.weights.write(weights)
        self._read_personal()
        labels, losses = list[float](), list[float]()
        techniques: list[TechniqueBuilder] = [round_figures(labels, losses)]
        if proximal_mu:
            techniques.append(proximal_term(proximal_mu))
        stage = StageDir(self.folder / ROUND_FOLDER)
        shutil.rmtree(stage.path, ignore_errors=True)
        num_steps = self.config.local_steps
        train(
            TrainJob(
                model=self.model,
                objective=self.objective(LaterBatches(self.source, number * num_steps)),
                config=client_steps(self.training, self.config),
                stage=stage,
                num_steps=num_steps,
                seed=self.seed,
                name=f"round {number + 1}",
                techniques=techniques,
                is_resumable=False,  # a client that comes back begins with the round that the server is in
            )
        )
        self._write_personal()
        change = (self.weights.read() - weights)[self.weights.num_frozen :]
        return ClientUpdate(change, sum(labels), float(np.mean(losses)))

    def _read_personal(self) -> None:
        path = self.folder / PERSONAL
        if not self.weights.personal or not path.exists():
            return
        try:
            stored = load_file(path)
            with torch.no_grad():
                for name in self.weights.personal:
                    self.model.get_parameter(name).copy_(torch.from_numpy(stored[name]))
        except Exception as error:  # safetensors has errors of its own
            raise ArtifactError(f"{path}: is damaged ({error}); remove it to begin with new personal weights") from None

    def _write_personal(self) -> None:
        if not self.weights.personal:
            return
        make_folder(self.folder)
        stored = {name: self.model.get_parameter(name).detach().numpy() for name in self.weights.personal}
        with writing(self.folder / PERSONAL):
            save_file(stored, self.folder / PERSONAL)
        save_adapter(self.model, self.folder / ADAPTER_FOLDER, base=self.base)


def client_steps(training: TrainConfig, config: FederatedConfig) -> TrainConfig:
    """Returns a stage's settings with the steps of a federated round: no decay and a constant rate, because a few steps
    of many clients are averaged; plain SGD does not clip, so that one step of all clients equals one step on all their
    rows.
    """
    precision = training.precision  # `auto` is measured by the stage itself, which need not have run
    return replace(
        training,
        precision=replace(precision, policy="fp32") if precision.policy == "auto" else precision,
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        batch_tokens=config.batch_tokens,
        max_grad_norm=0.0 if config.optimizer == "sgd" else training.max_grad_norm,
        num_steps=config.local_steps,
        num_tokens=0,
        num_epochs=0.0,
        lr_scaling="none",
        weight_decay=0.0,
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
        eval_every_steps=0,
        checkpoint_every_steps=0,
        checkpoint_every_minutes=0.0,
        keep_best=False,
    )


def round_figures(labels: list[float], losses: list[float]) -> TechniqueBuilder:
    """Builds a technique that appends the normalizer of every step, the number of labels in its mean, and its loss."""

    def on_gradients(update: Update) -> None:
        labels.append(sum(update.weights.values()))

    def on_step_end(info: StepInfo) -> None:
        losses.append(info.loss)

    return lambda run: Technique(
        name="round_figures", on_gradients=on_gradients, on_step_end=on_step_end, needs=frozenset()
    )


def proximal_term(mu: float) -> TechniqueBuilder:
    """Builds FedProx: adds the gradient of mu/2 times the squared distance from the weights at the start of
    the round.
    """

    def build(run: Runtime) -> Technique:
        start = {view.name: view.tensor.detach().clone() for view in run.parameters()}

        @torch.no_grad()
        def on_gradients(update: Update) -> None:
            now = {view.name: view.tensor for view in run.parameters()}
            for gradient in update.gradients:
                gradient.tensor.add_(now[gradient.name] - start[gradient.name], alpha=mu)

        return Technique(name="proximal_term", on_gradients=on_gradients, needs=frozenset())

    return build
