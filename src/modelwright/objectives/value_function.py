"""Value function of PPO: a head on the hidden states of the policy, or a separate model.

Legend: B rows, T tokens, D model width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import (
    is_sequence_classifier,
    load_config,
    load_model,
    load_sequence_classifier,
    set_parameter,
)
from modelwright.objectives.reward_model import HEAD
from modelwright.train.work import dense_flops, head_flops

VALUE = "value"
"""Name of the value function in `Decoder.heads`."""


class ValueFunction(Protocol):
    """Predicts the return at each token: the sum of later rewards."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Required properties of a run, as for an objective."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        """Returns the module `VALUE` for a policy of this shape; it maps `inputs` to values [B, T]."""
        ...

    def inputs(self, batch: TokenBatch, hidden: Callable[[], Tensor]) -> Tensor:
        """Returns the module's input. hidden: computes the hidden states of the policy [B, T, D] for the batch."""
        ...

    def flops(self, batch: TokenBatch) -> float:
        """FLOPs of forward and backward in an update; 0 if they are negligible against the policy's."""
        ...


class ValueHead(nn.Module):
    """Computes the value of each token from its hidden state."""

    def __init__(self, model_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(model_dim, 1, bias=bias)
        # As in lm-human-preferences: the first advantages are those of a baseline of 0, not of a random one
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.linear(hidden_BTD.to(self.linear.weight.dtype))[..., 0]


class ValueOnTrunk(ValueFunction):
    """A `ValueHead` on the hidden states of the policy, whose layers learn from both losses."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return {VALUE: ValueHead(config.model_dim)}

    def inputs(self, batch: TokenBatch, hidden: Callable[[], Tensor]) -> Tensor:
        return hidden()

    def flops(self, batch: TokenBatch) -> float:
        return 0.0


class ValueModel(nn.Module):
    """A decoder without an output projection, and a `ValueHead` on its hidden states."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = ValueHead(decoder.config.model_dim, bias=False)

    def forward(self, rows_3BT: Tensor) -> Tensor:
        """Computes values [B, T]. rows_3BT: token ids, positions and segments; see `SeparateValueModel.inputs`."""
        input_ids_BT, positions_BT, segments_BT = rows_3BT
        attend = packed_attend(segments_BT.int(), self.decoder.config.windows)
        return self.head(self.decoder(input_ids_BT, positions_BT, attend))


@dataclass(frozen=True, kw_only=True)
class SeparateValueModel(ValueFunction):
    """A separate model, all of whose weights are trained, as in InstructGPT (Ouyang et al. 2022, section 3.5) and TRL's
    PPOTrainer: policy and value losses have separate weights. It is neither divided along the tokens of a row, nor
    scaled layer by layer.
    """

    needs = frozenset({WHOLE_ROWS})
    shape: ModelConfig
    load: Callable[[], Decoder]
    """Reads the initial decoder; a reward model's head becomes the value head, without one values start at 0."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        if torch.get_default_device().type == "meta":  # a skeleton, which gets the values of a model in training
            return {VALUE: ValueModel(Decoder(replace(self.shape, tie_embeddings=True)))}
        start = self.load()
        # Tied embeddings leave out the output projection, which no value needs; the weights are shared, not copied
        with torch.device("meta"):
            trunk = Decoder(replace(start.config, tie_embeddings=True))
        for name, _ in list(trunk.named_parameters()):
            set_parameter(trunk, name, start.get_parameter(name).detach())
        model = ValueModel(trunk)
        if HEAD in start.heads:
            set_parameter(model.head, "linear.weight", start.heads.get_parameter(f"{HEAD}.weight").detach().clone())
        return {VALUE: model}

    def inputs(self, batch: TokenBatch, hidden: Callable[[], Tensor]) -> Tensor:
        # One tensor, because `Decoder.head_output` passes one
        return torch.stack([batch.input_ids_BT, batch.positions_BT, batch.segments_BT.to(batch.input_ids_BT.dtype)])

    def flops(self, batch: TokenBatch) -> float:
        return float(dense_flops(self.shape, batch) - 3 * head_flops(self.shape, batch))


def separate_value_model(folder: Path) -> SeparateValueModel:
    """Returns a value model that starts from a folder. Raises `ModelError` as `load_model` does."""
    # A reward model's weights, its head included, or a language model's
    load = partial(load_sequence_classifier, folder, head=HEAD) if is_sequence_classifier(folder) else None
    return SeparateValueModel(shape=load_config(folder), load=load or partial(load_model, folder))
