"""Distillation of a teacher's attention: relations of the last layers, or the distributions of heads.

Relations between queries, keys and values (Wang et al. 2021, MiniLMv2, arXiv 2012.15828) compare any two models.
Distributions (Wang et al. 2020, MiniLM, arXiv 2002.10957) are the heads' softmax; they need equal numbers of heads.

Legend: B rows, T tokens, C student's and E teacher's channels of all heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, Protocol

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import HeadInputs
from modelwright.model.config import ModelConfig
from modelwright.ops.attention_divergence import QueriesAndKeys, attention_divergence, relation_loss

AttentionForm = Literal["relations", "distributions"]


class AttentionTargets(Protocol):
    """Comparison of two models' attention."""

    student: ModelConfig
    teacher: ModelConfig
    pairs: Sequence[tuple[int, int]]
    """Layers of student and teacher whose queries, keys and values are read."""

    def extras(self, heads: Mapping[int, HeadInputs]) -> dict[str, Tensor]:
        """Returns the teacher's tensors that a batch carries as extras, by name."""
        ...

    def loss(self, heads: Sequence[HeadInputs], batch: TokenBatch) -> Tensor:
        """Sum over tokens of the mean divergence. heads: inputs of the student's layers, with gradients."""
        ...


@dataclass(frozen=True)
class AttentionRelations(AttentionTargets):
    """Queries with queries, keys with keys, values with values, of the last layers."""

    student: ModelConfig
    teacher: ModelConfig
    pairs: Sequence[tuple[int, int]]

    def extras(self, heads: Mapping[int, HeadInputs]) -> dict[str, Tensor]:
        ((_, layer),) = self.pairs
        return {f"relation_{kind}_BTE": channels for kind, channels in enumerate(heads[layer])}

    def loss(self, heads: Sequence[HeadInputs], batch: TokenBatch) -> Tensor:
        """Sum over tokens of the mean divergence over relation heads and the three kinds."""
        num_heads, (own,) = num_relation_heads(self.student, self.teacher), heads
        losses = [
            relation_loss(channels, batch.extras[f"relation_{kind}_BTE"], batch.segments_BT, num_heads=num_heads)
            for kind, channels in enumerate(own)
        ]
        return torch.stack(losses).sum() / (num_heads * len(losses))


@dataclass(frozen=True)
class AttentionDistributions(AttentionTargets):
    """The softmax of queries times keys in each head of the mapped layers, which must be comparable."""

    student: ModelConfig
    teacher: ModelConfig
    pairs: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        if self.student.num_heads != self.teacher.num_heads:
            raise ConfigError(
                f"attention_form: distributions compare head by head, and the student has {self.student.num_heads} "
                f"heads, the teacher {self.teacher.num_heads}; choose relations, or a student with as many heads"
            )
        for own, layer in self.pairs:
            windows = [config.window_of(at) for config, at in ((self.student, own), (self.teacher, layer))]
            if windows[0] != windows[1]:
                sees, other = (f"{window} tokens" if window else "all earlier tokens" for window in windows)
                raise ConfigError(
                    f"attention_form: distributions are over the same tokens, and layer {own} of the student sees "
                    f"{sees}, layer {layer} of the teacher {other}; map layers that see the same with layer_map, or "
                    "choose relations"
                )

    def extras(self, heads: Mapping[int, HeadInputs]) -> dict[str, Tensor]:
        queries = {f"queries_{own}_BTE": heads[layer].q_BTC for own, layer in self.pairs}
        return queries | {f"keys_{own}_BTE": heads[layer].k_BTE for own, layer in self.pairs}

    def loss(self, heads: Sequence[HeadInputs], batch: TokenBatch) -> Tensor:
        """Sum over tokens of the mean divergence over heads and pairs of layers."""
        losses = [
            attention_divergence(
                _queries_and_keys(inputs.q_BTC, inputs.k_BTE, self.student),
                _queries_and_keys(batch.extras[f"queries_{own}_BTE"], batch.extras[f"keys_{own}_BTE"], self.teacher),
                batch.segments_BT,
                window=self.student.window_of(own),
            )
            for (own, _), inputs in zip(self.pairs, heads, strict=True)
        ]
        return torch.stack(losses).sum() / (self.student.num_heads * len(losses))


def attention_targets(
    form: AttentionForm, student: ModelConfig, teacher: ModelConfig, pairs: Sequence[tuple[int, int]]
) -> AttentionTargets:
    """Returns the comparison of this form. pairs: the mapped layers of student and teacher."""
    if form == "relations":
        # Of the last layers, whatever the map: MiniLMv2 leaves the other layers of the student free
        return AttentionRelations(student, teacher, [(student.num_layers - 1, teacher.num_layers - 1)])
    return AttentionDistributions(student, teacher, pairs)


def num_relation_heads(student: ModelConfig, teacher: ModelConfig) -> int:
    """Largest number that divides all widths of queries and keys, at most twice the teacher's heads."""
    # More relation heads than attention heads carry finer relations (MiniLMv2, section 4.4)
    common = gcd(*(heads * one.head_dim for one in (student, teacher) for heads in (one.num_heads, one.num_kv_heads)))
    return max(number for number in range(1, 2 * teacher.num_heads + 1) if common % number == 0)


def _queries_and_keys(q_BTC: Tensor, k_BTE: Tensor, config: ModelConfig) -> QueriesAndKeys:
    q_BTHd = q_BTC.unflatten(-1, (config.num_heads, config.head_dim))
    k_BTKd = k_BTE.unflatten(-1, (config.num_kv_heads, config.head_dim))
    return QueriesAndKeys(q_BTHd, k_BTKd, config.attention.soft_cap)
