"""Selects the rows of a batch that are trained on, by a cheap probe of all rows.

The probe is a forward pass over the first tokens of each row, without gradient. Its result selects whole rows, or whole
groups of rows that belong together. A row that is not selected costs nothing else. Each rank selects among its own
rows, as many as the other ranks, or fewer if its limit excludes more.

Legend: B rows, T tokens, G groups of rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from modelwright.core.config import ConfigError, constant, derive_seed, only_for
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.attention import masked_attend
from modelwright.model.decoder import Attend, Decoder
from modelwright.ops.cross_entropy import LinearHead, token_log_probs
from modelwright.ops.matmul import Executed
from modelwright.train.work import all_attention_flops, head_flops


@dataclass(frozen=True, kw_only=True)
class BatchSelectionConfig:
    """Online batch selection: trains on some rows of each batch. The others cost only a short forward pass.

    The gradient is that of the mean loss over the selected rows: biased toward them for every signal but `random`.
    """

    signal: Literal["none", "loss", "loss_change", "random"] = "none"
    """Value of a row, judged on its first `probe_tokens` tokens: `loss`; `loss_change`, the distance in either
    direction from its loss at the start of the run; `random`, the baseline; `none` trains on all rows."""
    keep_fraction: float = field(default=0.4, metadata=only_for("signal", "loss", "loss_change", "random"))
    """Fraction of the rows that are trained on."""
    probe_tokens: int = constant(32)
    """Tokens of each row that the signal is measured on."""
    random_fraction: float = constant(0.25)
    """Fraction of the selected rows drawn at random, so that no kind of row is ignored forever."""
    max_initial_loss: float = 0.0
    """Never train on rows that the initial weights predict worse than this, in units of ln(vocabulary size), the loss
    of a uniform guess; 0 sets no limit. It filters garbage out of an uncleaned stream (CCNet's perplexity filter,
    Wenzek et al. 2019) and is useless from scratch."""
    dense_fraction: float = constant(0.0)
    """Fraction of the run, at its start, that trains on all rows."""

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ConfigError(f"keep_fraction: must be above 0 and at most 1, got {self.keep_fraction}; 1 selects all")
        if not 0.0 <= self.random_fraction <= 1.0:
            text = f"random_fraction: must be from 0 to 1, got {self.random_fraction}"
            raise ConfigError(f"{text}; 0.25 draws a quarter at random")
        if not 0.0 <= self.dense_fraction < 1.0:
            raise ConfigError(f"dense_fraction: must be at least 0 and below 1, got {self.dense_fraction}")
        if not 0.0 <= self.max_initial_loss < math.inf:
            text = f"max_initial_loss: must be at least 0, got {self.max_initial_loss}"
            raise ConfigError(f"{text}; 1 is the loss of a random guess")
        if self.max_initial_loss and self.signal == "none":
            text = "max_initial_loss: needs a signal"
            raise ConfigError(f"{text}; with signal random and keep_fraction 1 nothing else is excluded")
        if self.probe_tokens < 2:
            raise ConfigError(f"probe_tokens: must be at least 2 tokens, got {self.probe_tokens}; 32 is usual")

    @property
    def is_on(self) -> bool:
        """True if the batch is changed before it is trained on."""
        return self.signal != "none"

    @property
    def needs_start(self) -> bool:
        """True if the initial weights of the run are kept."""
        return self.signal == "loss_change" or self.max_initial_loss > 0

    def num_chosen(self, num_rows: int, num_parts: int) -> int:
        """Maximum number of selected rows of a rank; `num_parts` microbatches share them equally, at least one each.
        Raises `ConfigError` if that is all of the rows, so that nothing is left to select.
        """
        chosen = max(1, round(self.keep_fraction * num_rows / num_parts)) * num_parts
        if chosen > num_rows or (chosen == num_rows and self.keep_fraction < 1.0):
            fewer = "set gradient_accumulation_steps to 1" if num_parts > 1 else "lower it"
            raise ConfigError(
                f"batch_selection.keep_fraction: {self.keep_fraction:g} of {num_rows} rows on a rank, in "
                f"{num_parts} equal microbatches, selects all of them; {fewer}, or use more rows or fewer replicas"
            )
        return chosen


@dataclass(eq=False)
class BatchSelector:
    """Selects the rows of one step after the other. num_parts: microbatches, which must share
    the selected rows equally; executed: counts the FLOPs of the probes.
    """

    config: BatchSelectionConfig
    model: Decoder
    seed: int
    rank: int
    num_parts: int
    executed: Executed
    start: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Weights with which the run began; empty before its first step, and where they are not needed."""

    def __call__(self, batch: TokenBatch, step: int, num_steps: int) -> TokenBatch:
        """Returns the selected part of the batch in update `step`, on the batch's device."""
        if self.config.needs_start and not self.start:
            self.start = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        if self.config.signal != "none" and step >= self.config.dense_fraction * num_steps:
            chosen = self.groups(batch, step)
            # If the limit leaves a number that microbatches cannot share equally, groups beyond it fill up, with zero
            # weight.
            num_filled = -len(chosen) % self.num_parts if len(chosen) else self.num_parts
            if num_filled:
                left = torch.ones(batch.num_groups, dtype=torch.bool)
                left[chosen] = False
                filled = left.nonzero().flatten()[:num_filled]
                batch, chosen = batch.without_weight(filled), torch.cat([chosen, filled]).sort().values
            batch = batch.take(chosen)
        return batch

    def groups(self, batch: TokenBatch, step: int) -> Tensor:
        """The numbers of the groups that are trained on, in increasing order; none beyond the limit."""
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "rows", step, self.rank))
        worth_G, is_within_G = self.look(batch)
        if worth_G is None:
            order = torch.randperm(batch.num_groups, generator=draw)
        else:
            order = worth_G.argsort(descending=True, stable=True)
        order = order[is_within_G[order]]
        places = min(self.config.num_chosen(batch.num_groups, self.num_parts), len(order))
        if worth_G is None:
            return order[:places].sort().values
        # A share of few rows is rarely a whole number: rounding at random keeps the share in the mean.
        expected = self.config.random_fraction * places
        num_drawn = int(expected) + int(torch.rand((), generator=draw).item() < expected % 1.0)
        num_drawn = min(num_drawn, len(order) - places)
        rest = order[places - num_drawn :]
        drawn = rest[torch.randperm(len(rest), generator=draw)[:num_drawn]]
        return torch.cat([order[: places - num_drawn], drawn]).sort().values

    def look(self, batch: TokenBatch) -> tuple[Tensor | None, Tensor]:
        """The value of training on each group, [G], None if all are alike; and whether it is within the limit, [G]."""
        is_within_G = torch.ones(batch.num_groups, dtype=torch.bool)
        if self.config.signal == "random" and not self.config.needs_start:
            return None, is_within_G
        look = first_tokens(batch, self.config.probe_tokens).to(self.model.embedding.weight.device)
        attend = masked_attend(look.segments_BT, self.model.config.windows)
        start_G = self.group_losses(look, attend, self.start) if self.config.needs_start else None
        if self.config.max_initial_loss and start_G is not None:
            is_within_G = start_G <= self.config.max_initial_loss * math.log(self.model.config.vocab_size)
        if self.config.signal == "random":
            return None, is_within_G
        now_G = self.group_losses(look, attend, {})
        return now_G if self.config.signal == "loss" or start_G is None else (now_G - start_G).abs(), is_within_G

    @torch.no_grad()
    def group_losses(self, batch: TokenBatch, attend: Attend, weights: Mapping[str, Tensor]) -> Tensor:
        """The mean over the rows of each group of the mean loss of a row's labels, FP32 [G], on the CPU; rows without
        labels get the mean of the others. weights: to use instead of the model's own.
        """
        inputs = (batch.input_ids_BT, batch.positions_BT, attend)
        hidden_BTD = functional_call(self.model, dict(weights), inputs) if weights else self.model(*inputs)
        head = "embedding.weight" if self.model.head is None else "head.weight"
        projection = LinearHead(
            weight_UD=weights.get(head, self.model.head_weight),
            soft_cap=self.model.config.logit_soft_cap,
            compute=hidden_BTD.dtype,
        )
        found_N = token_log_probs(hidden_BTD.flatten(0, 1), projection, batch.labels_BT.flatten())
        shape = self.model.config
        self.executed.add(all_attention_flops(shape, batch) + head_flops(shape, batch))
        counts_B = (batch.labels_BT != IGNORED).sum(dim=1)
        sums_B = -found_N.view_as(batch.labels_BT).sum(dim=1)
        mean = sums_B.sum() / counts_B.sum().clamp(min=1)
        losses_B = torch.where(counts_B > 0, sums_B / counts_B.clamp(min=1), mean).cpu()
        return losses_B if batch.group_size == 1 else losses_B.view(-1, batch.group_size).mean(dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {"start": dict(self.start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.model.embedding.weight.device
        self.start = {name: weight.to(device) for name, weight in state["start"].items()}


def first_tokens(batch: TokenBatch, num_tokens: int) -> TokenBatch:
    """The first tokens of every row, with the labels that they predict; for a row that has none among them (a question,
    whose answer comes later), the tokens themselves.
    """
    inputs, segments = batch.input_ids_BT[:, : num_tokens + 1], batch.segments_BT[:, : num_tokens + 1]
    labels_BT = batch.labels_BT[:, :num_tokens]
    follow_BT = torch.full_like(labels_BT, IGNORED)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    follow_BT[:, : same.shape[1]] = torch.where(same, inputs[:, 1:], IGNORED)
    is_blind_B1 = (labels_BT == IGNORED).all(dim=1, keepdim=True)
    return TokenBatch(
        input_ids_BT=inputs[:, :num_tokens],
        labels_BT=torch.where(is_blind_B1, follow_BT, labels_BT),
        positions_BT=batch.positions_BT[:, :num_tokens],
        segments_BT=segments[:, :num_tokens],
        group_size=batch.group_size,
    )
