"""EWC, elastic weight consolidation: each weight is pulled toward its starting value, in proportion to its importance
for earlier tasks (Kirkpatrick et al. 2017, Overcoming catastrophic forgetting in neural networks,
https://arxiv.org/abs/1612.00796).

The loss gets strength / 2 x sum F_i (w_i - start_i)^2, with F the diagonal of the Fisher information of the starting
weights, in nats per predicted token. To second order half of that sum is the divergence from the starting model on old
text, so at strength 1 a nat of it costs as much as a nat of loss.

F is the true Fisher information, not the empirical one: labels are sampled from the model. Given the text before them,
the scores of tokens are then independent with mean zero, so the squared gradient of a whole row has the sum of its
tokens' information as its mean, and a row costs one backward pass (the Gauss-Newton-Bartlett estimator of Liu et al.
2023, https://arxiv.org/abs/2305.14342, section 2.3).
"""

# PyTorch leaves the type of split open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelwright.core import compatibility as traits
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError, constant, derive_seed
from modelwright.data.rows.batch import IGNORED
from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.parallel.mesh import World
from modelwright.train.objective import Batch, forward
from modelwright.train.technique import Runtime, Technique, Update

LABELS = "sampled"
"""Origin of the labels of the Fisher information, for the checkpoint: drawn from the model, not taken from the text."""
_NEEDS = (
    traits.TRAINED_WEIGHTS, traits.SYNCHRONOUS_UPDATES, traits.OWN_WEIGHTS, traits.LASTING_LAYOUT,
    traits.UNDIVIDED_GRADIENTS, traits.WHOLE_GRADIENTS, traits.WHOLE_MODEL, traits.SAME_UNITS,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EwcConfig:
    """Elastic weight consolidation: weights that old text depends on are kept near where training began."""

    strength: float = 0.0
    """Weight of a nat per token of divergence from the starting model on old text, against a nat of loss (Kirkpatrick
    et al. 2017); 0 disables it. It needs the memory of two more copies of the weights."""
    num_rows: int = constant(256)
    """Rows of old text from which the importance of weights is estimated, by a forward and a backward pass each."""
    source: str = ""
    """The source of the old text, such as `old` in an update; "" takes rows of all sources."""

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ConfigError(f"strength: must not be negative, got {self.strength:g}; 0 disables it")
        if self.num_rows < 1:
            raise ConfigError(f"num_rows: must be at least 1, got {self.num_rows}; 256 is usual")

    def features(self) -> list[traits.Feature]:
        return [traits.feature("strength", self.strength, needs=_NEEDS)] if self.strength else []


class Consolidation:
    """Keeps the starting weights and the Fisher information of each. A checkpoint has the information, so that a
    resumed run does not estimate it again, and the range of the starting weights, which reveals another start.
    """

    def __init__(self, strength: float, run: Runtime, rows: Sequence[Batch]) -> None:
        self.strength = strength
        self.run = run
        self.rows = rows
        self.start = {view.name: view.tensor.detach().clone() for view in run.parameters()}
        self.range = [
            min(float(part.min()) for part in self.start.values()),
            max(float(part.max()) for part in self.start.values()),
        ]
        self.fisher: dict[str, Tensor] = {}

    def on_batch(self, step: int, batch: Batch) -> Batch:
        """Estimates the information before the first update, when the weights are those of the start."""
        if not self.fisher:
            seed = derive_seed(self.run.seed, "ewc")
            self.fisher = fisher_diagonal(self.run.model, self.rows, seed=seed, world=self.run.mesh.world)
        return batch

    @torch.no_grad()
    def on_gradients(self, update: Update) -> None:
        weights = {view.name: view.tensor for view in self.run.parameters()}
        penalty = torch.zeros((), dtype=torch.float64, device=self.run.mesh.world.device)
        for view in update.gradients:
            moved = weights[view.name] - self.start[view.name]
            pull = self.fisher[view.name] * moved
            view.tensor.add_(pull, alpha=self.strength)
            penalty += (pull * moved).sum().double()
        update.metrics["ewc_penalty"] = 0.5 * self.strength * float(penalty)

    def state_dict(self) -> dict[str, Any]:
        # Laid out like the parameters, so that a checkpoint can be resumed under another layout.
        views = self.run.parameters() if self.fisher else []
        fisher = {view.name: view.laid_out(self.fisher[view.name]) for view in views}
        return {"fisher": fisher, "range": self.range, "labels": LABELS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["range"]) != self.range:
            raise ArtifactError(
                "ewc: the checkpoint belongs to a training from another model than the one that the run starts from; "
                "give the model that the run began with, or another --run-dir"
            )
        fisher = state["fisher"]
        self.fisher = {view.name: view.part_of(fisher[view.name]).clone() for view in self.run.parameters() if fisher}


def fisher_diagonal(model: Decoder, rows: Sequence[Batch], *, seed: int, world: World) -> dict[str, Tensor]:
    """The diagonal of the Fisher information of every trained parameter, in nats per predicted token. The ranks divide
    the rows, and get the same result.

    rows: one or more rows each, whose labels say only which tokens are predicted. Raises `ConfigError` if none is.
    """
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    sums = {name: torch.zeros_like(one, memory_format=torch.contiguous_format) for name, one in parameters.items()}
    num_tokens = 0
    was_training = model.training
    model.eval()  # without the terms that layers add to the loss
    for number in range(world.rank, len(rows), world.size):
        row = rows[number].to(world.device)
        # Seeded by the row's number, so that labels do not depend on the number of ranks.
        draw = torch.Generator(world.device).manual_seed(derive_seed(seed, number))
        hidden_BTD = forward(model, row)
        labels_BT = sampled_labels(model, hidden_BTD.detach(), row.labels_BT, draw)
        # `autograd.grad`, not `backward`: the parameters' own gradients and hooks stay untouched.
        gradients = torch.autograd.grad(
            model.token_log_probs(hidden_BTD, labels_BT).sum(),
            list(parameters.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.addcmul_(gradient, gradient)
        num_tokens += row.num_targets
    model.train(was_training)
    all_tokens = int(world.sums([num_tokens])[0])
    if not all_tokens:
        raise ConfigError("ewc.source: no token of its rows is predicted; name a source with text to keep")
    return {name: world.all_reduce_sum(total).div_(all_tokens) for name, total in sums.items()}


@torch.no_grad()
def sampled_labels(model: Decoder, hidden_BTD: Tensor, labels_BT: Tensor, draw: torch.Generator) -> Tensor:
    """A token drawn from the model's distribution wherever there is a label, and no label elsewhere, [B, T]."""
    sampled_BT = torch.full_like(labels_BT, IGNORED)
    hidden_ND = hidden_BTD[labels_BT != IGNORED]
    parts = [
        torch.multinomial(model.logits(part_ND).float().softmax(-1), 1, generator=draw).squeeze(-1)
        for part_ND in hidden_ND.split(CHUNK_TOKENS)
    ]
    if parts:
        sampled_BT[labels_BT != IGNORED] = torch.cat(parts)
    return sampled_BT


def ewc(config: EwcConfig, run: Runtime, *, rows: Sequence[Batch]) -> Technique | None:
    """See `Consolidation`. rows: of earlier tasks."""
    if not config.strength:
        return None
    if not rows:
        raise ConfigError("ewc.strength: needs rows of earlier tasks; an update replays them")
    # A run is laid out once (`LASTING_LAYOUT`) and loads its checkpoint later, so these weights are the starting ones.
    kept = Consolidation(config.strength, run, rows)
    return Technique(name="ewc", on_batch=kept.on_batch, on_gradients=kept.on_gradients, state=kept, needs=frozenset())
