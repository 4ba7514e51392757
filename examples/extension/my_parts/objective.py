# An objective: next tokens with smoothed labels (Szegedy et al. 2016, section 7), and a metric of its own.
# modelwright run tiny --pretrain.objective.smoothed.epsilon 0.1
# Losses are sums, with the counts that normalize them, so that any number of processes gives the same gradient.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import num_targets, numbered_batches
from modelwright.train.objective import BatchSource, Objective, Terms
from modelwright.train.outside import ObjectiveSpec


@dataclass(frozen=True, kw_only=True)
class SmoothedConfig:
    epsilon: float = 0.1
    """Share of the probability that is spread evenly over the vocabulary."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise ConfigError(f"epsilon: must be in [0, 1), got {self.epsilon}")


@dataclass(frozen=True)
class Smoothed(Objective):
    metric_names = ("share_right",)
    epsilon: float
    source: BatchSource

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return numbered_batches(self.source, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": num_targets(batch)}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        logits_BTV, labels_BT = model.logits(output), batch.labels_BT
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), labels_BT, label_smoothing=self.epsilon, reduction="sum", ignore_index=IGNORED
        )
        num_right = (logits_BTV.argmax(-1) == labels_BT).sum()
        return Terms({"loss": loss}, {"share_right": (num_right, num_targets(batch))})


SMOOTHED = ObjectiveSpec(build=lambda config, inputs: Smoothed(config.epsilon, inputs.loader), config=SmoothedConfig)
