"""Four objectives that carry what later stages will: a rollout, preference pairs, a teacher, a replay buffer.

Small, but whole: each trains, is checkpointed and goes on with the same bits, on any number of data ranks.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tiny_run
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.compatibility import WHOLE_MODEL, WHOLE_ROWS
from modelwright.core.config import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import Objective, Terms

PROMPT_LEN = 4


def label_log_probs(output: Tensor, batch: TokenBatch, model: Decoder) -> Tensor:
    """log p(label) of every token [B, T], 0 where there is none."""
    return -F.cross_entropy(model.logits(output).transpose(1, 2), batch.labels_BT, reduction="none")


@dataclass
class Ppo(Objective):
    """Clipped policy gradient (Schulman et al. 2017) with the mean reward of a group as its baseline (GRPO, Shao et al.
    2024). A rollout is learned from in two steps; a completion is better the more of its tokens are even."""

    needs = frozenset({WHOLE_MODEL})
    group_size: int = 2
    num_steps_per_rollout: int = 2
    on_generated: Callable[[int], None] = lambda num_finished: None
    rollout: dict[str, Tensor] = field(default_factory=dict)

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for step in itertools.count(first):
            if step % self.num_steps_per_rollout == 0 or not self.rollout:
                self.rollout = self.roll_out(model, step, rank, tiny_run.ROWS // world_size)
            base = {name: self.rollout[name] for name in ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")}
            extras = {name: self.rollout[name] for name in ("old_log_probs_BT", "advantages_B")}
            yield TokenBatch(**base, extras=extras, group_size=self.group_size)

    def roll_out(self, model: Decoder, step: int, rank: int, num_rows: int) -> dict[str, Tensor]:
        rows = range(rank * num_rows, (rank + 1) * num_rows)
        prompts = [[(7 * (row // self.group_size) + step + i) % 64 for i in range(PROMPT_LEN)] for row in rows]
        num_new = tiny_run.LENGTH - PROMPT_LEN
        params = [SamplingParams(max_tokens=num_new, seed=derive_seed(step, "rollout", row)) for row in rows]
        found = generate(model, prompts, params, on_step=self.on_generated)
        ids_BT = torch.tensor([p + c.token_ids for p, c in zip(prompts, found, strict=True)])
        labels_BT = torch.cat([ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORED)], dim=1)
        labels_BT[:, : PROMPT_LEN - 1] = IGNORED
        old_BT = torch.zeros(ids_BT.shape, dtype=torch.float64)
        old_BT[:, PROMPT_LEN - 1 : -1] = torch.tensor([c.logprobs for c in found], dtype=torch.float64)
        rewards_GR = (ids_BT[:, PROMPT_LEN:] % 2 == 0).double().mean(dim=1).view(-1, self.group_size)
        return {
            "input_ids_BT": ids_BT,
            "labels_BT": labels_BT,
            "positions_BT": torch.arange(tiny_run.LENGTH).expand_as(ids_BT).contiguous(),
            "segments_BT": torch.zeros_like(ids_BT, dtype=torch.int32),
            "old_log_probs_BT": old_BT,
            "advantages_B": (rewards_GR - rewards_GR.mean(dim=1, keepdim=True)).flatten(),
        }

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"policy": (batch.labels_BT != IGNORED).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        ratio_BT = (label_log_probs(output, batch, model) - batch.extras["old_log_probs_BT"]).exp()
        advantages_B1 = batch.extras["advantages_B"][:, None]
        gain_BT = torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(0.8, 1.2) * advantages_B1)
        return Terms({"policy": -(gain_BT * (batch.labels_BT != IGNORED)).sum()})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.rollout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollout = dict(state["rows"])


@dataclass
class Dpo(Objective):
    """Direct preference optimization (Rafailov et al. 2023): of two neighboring rows the first is the better one."""

    needs = frozenset({WHOLE_ROWS})
    metric_names = ("accuracy", "margin")
    reference: FrozenModel
    beta: float = 0.5
    source: tiny_run.Rows = field(default_factory=tiny_run.Rows)

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for step in itertools.count(first):
            yield self.prepare(self.source.batch(step, rank=rank, world_size=world_size), model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        pairs = TokenBatch(**{**vars(batch), "group_size": 2})
        log_probs_B = self.reference.log_probs(pairs, num_parts=2).double().sum(dim=1)
        return TokenBatch(**{**vars(pairs), "extras": {"reference_log_probs_B": log_probs_B}})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"preference": (batch.labels_BT != IGNORED).any(dim=1).view(-1, 2).any(dim=1).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        policy_B = label_log_probs(output, batch, model).sum(dim=1)
        chosen_P, rejected_P = (policy_B - batch.extras["reference_log_probs_B"]).view(-1, 2).unbind(1)
        counts_P = (batch.labels_BT != IGNORED).any(dim=1).view(-1, 2).any(dim=1)
        margins_P, num_pairs = self.beta * (chosen_P - rejected_P), counts_P.sum()
        metrics = {
            "accuracy": (((margins_P > 0) * counts_P).sum(), num_pairs),
            "margin": ((margins_P.detach() * counts_P).sum(), num_pairs),
        }
        return Terms({"preference": -(F.logsigmoid(margins_P) * counts_P).sum()}, metrics)


@dataclass
class Distillation(Objective):
    """The teacher's distribution (Hinton et al. 2015) and its hidden states (Jiao et al. 2020, TinyBERT)."""

    needs = frozenset()
    teacher: FrozenModel
    temperature: float = 2.0
    source: tiny_run.Rows = field(default_factory=tiny_run.Rows)

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for step in itertools.count(first):
            batch = self.source.batch(step, rank=rank, world_size=world_size)
            outputs = {"hidden_BTD": self.teacher.hidden(batch), "logits_BTV": self.teacher.logits(batch, num_parts=2)}
            yield TokenBatch(**{**vars(batch), "extras": outputs})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        num_tokens = (batch.segments_BT >= 0).sum()
        return {"kl": num_tokens, "hidden": num_tokens * batch.extras["hidden_BTD"].shape[-1]}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        real_BT = batch.segments_BT >= 0
        student_BTV = F.log_softmax(model.logits(output) / self.temperature, dim=-1)
        teacher_BTV = F.log_softmax(batch.extras["logits_BTV"] / self.temperature, dim=-1)
        kl_BT = F.kl_div(student_BTV, teacher_BTV, log_target=True, reduction="none").sum(-1) * self.temperature**2
        distance_BT = (output - batch.extras["hidden_BTD"]).square().sum(-1)
        return Terms({"kl": (kl_BT * real_BT).sum(), "hidden": (distance_BT * real_BT).sum()})


@dataclass
class Replay(Objective):
    """New rows, some of which are replaced by rows seen before, at half the weight; a reservoir keeps one for each
    place of the batch (Chaudhry et al. 2019, tiny episodic memories)."""

    needs = frozenset()
    source: tiny_run.Rows = field(default_factory=tiny_run.Rows)
    reservoir: dict[str, Tensor] = field(default_factory=dict)

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for step in itertools.count(first):
            new = self.source.batch(step, rank=rank, world_size=world_size)
            rows = range(rank * new.num_rows, (rank + 1) * new.num_rows)
            draw_B = torch.tensor([derive_seed(step, "replay", row) % 100 for row in rows])
            yield self.mixed(new, replays_B=(draw_B < 40) & bool(self.reservoir), remembers_B=draw_B >= 80)

    def mixed(self, new: TokenBatch, *, replays_B: Tensor, remembers_B: Tensor) -> TokenBatch:
        names = ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")
        fresh = {name: getattr(new, name) for name in names}
        before = self.reservoir or fresh
        mixed = {name: torch.where(replays_B[:, None], before[name], fresh[name]) for name in names}
        self.reservoir = {name: torch.where(remembers_B[:, None], fresh[name], before[name]) for name in names}
        return TokenBatch(**mixed, extras={"weights_B": torch.where(replays_B, 0.5, 1.0).double()})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": ((batch.labels_BT != IGNORED).sum(dim=1) * batch.extras["weights_B"]).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        nll_B = -label_log_probs(output, batch, model).sum(dim=1)
        return Terms({"loss": (nll_B * batch.extras["weights_B"]).sum()})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.reservoir)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reservoir = dict(state["rows"])
