"""Preference optimization: DPO, IPO and ORPO learn from pairs of answers, KTO (Ethayarajh et al. 2024) from single
answers that are labeled as desirable or undesirable.

Reward models: pairwise logistic loss of a scalar head on the last token of an answer (Bradley and Terry 1952; Ouyang
et al. 2022, section 3.5), scores by such models, and the term `model` of a weighted sum of rewards. The rules of
`reward/` work without a model.

Legend: B rows, T tokens, G groups of two rows, S pieces of a row, P pairs, A answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.core.config import ConfigError, only_for
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import load_sequence_classifier
from modelwright.objectives.next_token import numbered_batches
from modelwright.ops.lowp_linear import Format
from modelwright.ops.piece_sums import count_pieces, piece_ends, piece_sums
from modelwright.parallel.mesh import World, default_device, single
from modelwright.reward.build import REWARDS
from modelwright.reward.reward import Reward, RewardConfig, Sample, Score
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import BatchSource, ForwardSums, Metric, Objective, Terms


class PairValues(NamedTuple):
    """A value of each answer of the pairs in a batch, [P] each."""

    chosen: Tensor
    rejected: Tensor

    def __truediv__(self, other: "PairValues") -> "PairValues":
        return PairValues(self.chosen / other.chosen, self.rejected / other.rejected)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a batch: piece s of a group's first row is the chosen answer, that of its second the rejected one."""

    segments_BT: Tensor
    num_pieces: int
    is_pair_GS: Tensor
    lengths: PairValues
    """Number of labels of each answer."""

    @classmethod
    def of(cls, batch: TokenBatch) -> "Pairs":
        """Finds the pairs of a batch with groups of two rows."""
        num_pieces = count_pieces(batch.segments_BT)
        lengths_G2S = piece_sums(batch.labels_BT != IGNORED, batch.segments_BT, num_pieces).unflatten(0, (-1, 2))
        # Pieces without labels, such as padding, are skipped
        is_pair_GS = (lengths_G2S > 0).all(dim=1)
        return cls(batch.segments_BT, num_pieces, is_pair_GS, _selected(lengths_G2S, is_pair_GS))

    @property
    def count(self) -> Tensor:
        """Number of pairs, a scalar."""
        return self.is_pair_GS.sum()

    def sums(self, values_BT: Tensor) -> PairValues:
        """Sums the values over the tokens of each answer, with gradients."""
        sums_BS = piece_sums(values_BT, self.segments_BT, self.num_pieces)
        return _selected(sums_BS.unflatten(0, (-1, 2)), self.is_pair_GS)

    def means(self, values_P: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Returns the mean of each value over the pairs, as metrics."""
        return {name: (values.detach().sum(), self.count) for name, values in values_P.items()}


def _selected(values_G2S: Tensor, is_pair_GS: Tensor) -> PairValues:
    return PairValues(values_G2S[:, 0][is_pair_GS], values_G2S[:, 1][is_pair_GS])


def shares_right(margins_P: Tensor, resolution_P: Tensor | float = 0.0) -> Tensor:
    """Accuracy of each pair's order [P]: 1 where the chosen answer is ahead, 0 where the rejected one is, and one half
    for a tie, as in the area under the ROC curve. A margin of at most the resolution is a tie.
    """
    # The sign of such a margin is a matter of rounding. TRL counts ties as wrong and lacks a resolution, so that a
    # policy that equals its reference has an accuracy anywhere between 0 and 1 (`DPOTrainer`, `rewards/accuracies`)
    return (1 + margins_P.sign() * (margins_P.abs() > resolution_P)) / 2


def with_reference(batch: TokenBatch, reference: FrozenModel, *, num_parts: int) -> TokenBatch:
    """Adds `reference_BT` to a batch: reference log-probabilities of labels, FP32, in `num_parts` chunks of rows."""
    log_probs_BT = reference.log_probs(batch, num_parts=num_parts).to(batch.labels_BT.device)
    return replace(batch, extras={**batch.extras, "reference_BT": log_probs_BT})


def absent(names: Sequence[str], device: torch.device) -> dict[str, Metric]:
    """Returns metrics without a value, which are left out of the record."""
    nothing = torch.zeros((), device=device)
    return dict.fromkeys(names, (nothing, nothing))


PREFERENCE, NLL = "preference", "nll"
"""Names of the loss terms."""
MOST_LOG_PROB = -1e-12
"""Upper limit of log p in odds p / (1 - p), which keeps them finite."""
RESOLUTION: Mapping[Format, float] = {
    "fp32": 2**-20, "fp16": 2**-10, "bf16": 2**-8, "int8": 2**-6, "fp8": 2**-4,
}  # fmt: skip
"""Largest margin from rounding for a policy that equals its reference, by the format of its matrix products, relative
to the root of the sum of the squared log-probabilities of the pair's tokens: errors of tokens are independent. Among
200 pairs of answers of 5 to 120 tokens the largest was 2**-23 in FP32 and 2**-10 in BF16. The others follow from BF16's
by the ratio of the formats' unit roundoffs."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TrainConfig):
    """Training on preference pairs."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "orpo"] = "sigmoid"
    """`sigmoid`: DPO (Rafailov et al. 2023); `sigmoid_norm`: with log-probabilities divided by the number of tokens
    (Lambert et al. 2024, section 5); `ipo`: identity preference optimization (Azar et al. 2023), divided in the same
    way; `orpo`: odds ratios, without a reference model (Hong et al. 2024)."""
    beta: float = 0.1
    """Regularization strength: beta of DPO and tau of IPO, which keep the policy near the reference; lambda of ORPO."""
    label_smoothing: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm"))
    """Probability that a label is wrong (conservative DPO, Mitchell 2023)."""
    rpo_alpha: float = field(default=0.0, metadata=only_for("loss", "sigmoid", "sigmoid_norm", "ipo"))
    """Weight of the chosen answers' negative log-likelihood per token (Pang et al. 2024); ORPO has it with 1."""
    reference: str = field(default="", metadata=only_for("loss", "sigmoid", "sigmoid_norm", "ipo"))
    """Hugging Face folder of the reference model; "" for the model that the stage starts from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise ConfigError(f"beta: must be above 0, got {self.beta}; 0.1 is usual")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing: must be in [0, 0.5), got {self.label_smoothing}; 0 trusts all labels")
        if self.rpo_alpha < 0:
            raise ConfigError(f"rpo_alpha: must not be negative, got {self.rpo_alpha}; 0 disables it")

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return self.loss != "orpo"

    @property
    def sft_weight(self) -> float:
        """Weight of the chosen answers' negative log-likelihood."""
        return 1.0 if self.loss == "orpo" else self.rpo_alpha


@dataclass(frozen=True)
class Preference(Objective):
    """Raises the log-probability of chosen answers against that of rejected ones, all pairs with equal weights."""

    needs = frozenset({WHOLE_ROWS})
    metric_names = (
        "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
        "logps/rejected", "log_odds_ratio", "log_odds_chosen", "nll_loss",
    )  # fmt: skip
    source: BatchSource
    config: PreferenceConfig
    reference: FrozenModel | None
    """Reference model, None for a loss without (`PreferenceConfig.has_reference`)."""

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in numbered_batches(self.source, first=first, rank=rank, world_size=world_size):
            yield self.prepare(batch, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        if self.reference is None:
            return batch
        return with_reference(batch, self.reference, num_parts=self.config.gradient_accumulation_steps)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        pairs = Pairs.of(batch)
        weights = {PREFERENCE: pairs.count}
        return weights | {NLL: pairs.lengths.chosen.sum()} if self.config.sft_weight else weights

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        log_probs_BT, pairs = model.token_log_probs(output, batch.labels_BT), Pairs.of(batch)
        log_probs = pairs.sums(log_probs_BT)
        metrics, losses = absent(self.metric_names, output.device), dict[str, Tensor]()
        beta, smoothing = self.config.beta, self.config.label_smoothing
        # Odds ratios have no reference whose rounding could be mistaken for a difference.
        resolution_P: Tensor | float = 0.0
        if self.config.sft_weight:
            nll, num_tokens = -log_probs.chosen.sum(), pairs.lengths.chosen.sum()
            losses[NLL] = self.config.sft_weight * nll
            metrics["nll_loss"] = nll, num_tokens
        if self.reference is None:
            scores = log_probs = log_probs / pairs.lengths
            log_odds_P = log_odds(scores.chosen) - log_odds(scores.rejected)
            losses[PREFERENCE] = -beta * F.logsigmoid(log_odds_P).sum()
            metrics |= pairs.means({"log_odds_ratio": F.logsigmoid(log_odds_P), "log_odds_chosen": log_odds_P})
        else:
            # Subtracted token by token: the sums of long answers are large, and their difference is small.
            scores = pairs.sums(log_probs_BT - batch.extras["reference_BT"])
            compared = scores if self.config.loss == "sigmoid" else scores / pairs.lengths
            margins_P = compared.chosen - compared.rejected
            if self.config.loss == "ipo":
                losses_P = (margins_P - 1 / (2 * beta)).square()  # equation 17 of Azar et al.
            else:
                logits_P = beta * margins_P
                losses_P = -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)
            losses[PREFERENCE] = losses_P.sum()
            # Differences of log-ratios up to this may be rounding; BF16 is the coarsest format that `auto` may become
            precision, squares = self.config.precision, pairs.sums(log_probs_BT.detach().square())
            formats = ("bf16",) if precision.policy == "auto" else precision.possible
            resolution_P = max(RESOLUTION[one] for one in formats) * (squares.chosen + squares.rejected).sqrt()
        # Under TRL's names; rewards are beta times the score, which is not divided by the length
        chosen_P, rejected_P = beta * scores.chosen, beta * scores.rejected
        metrics |= pairs.means(
            {
                "rewards/chosen": chosen_P,
                "rewards/rejected": rejected_P,
                "rewards/accuracies": shares_right(chosen_P - rejected_P, beta * resolution_P),
                "rewards/margins": chosen_P - rejected_P,
                "logps/chosen": log_probs.chosen,
                "logps/rejected": log_probs.rejected,
            }
        )
        return Terms(losses, metrics)


def log_odds(log_probs_P: Tensor) -> Tensor:
    """Computes log(p / (1 - p)) from log p."""
    log_probs_P = log_probs_P.clamp(max=MOST_LOG_PROB)
    return log_probs_P - (-log_probs_P.expm1()).log()


KTO_LOSS = "kto"
PREFIX = "mismatched_"
"""Prefix of the extras with the tensors of mismatched rows."""
TENSORS = ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")


@dataclass(frozen=True, kw_only=True)
class KtoConfig(TrainConfig):
    """Training on answers with a label."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    beta: float = 0.1
    """Regularization strength: higher values keep the policy closer to the reference."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable answers. The weights should make up for unequal numbers: the weighted number of
    desirable answers from 1 to 4/3 times that of the others (section 4.2)."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable answers."""
    reference: str = ""
    """Hugging Face folder of the reference model; "" for the model that the stage starts from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}; the default is usual")


@dataclass(frozen=True)
class Kto(Objective):
    """Raises the log-probability of desirable answers, and lowers that of undesirable ones, against the KL divergence
    of policy and reference. Answers differ by their weights only.

    The source has groups of two rows, the second with mismatched answers (`data.rows.examples`). They are evaluated
    before the step, without gradient: the KL divergence is the mean of their log-ratios over the global batch, at least
    0, for any number of microbatches.
    """

    needs = frozenset({WHOLE_ROWS})
    metric_names = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    source: BatchSource
    config: KtoConfig
    reference: FrozenModel

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        for batch in numbered_batches(self.source, first=first, rank=rank, world_size=world_size):
            yield self.prepare(batch, model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        batch = with_reference(batch, self.reference, num_parts=self.config.gradient_accumulation_steps)
        answers, others = batch.rows_at(0), batch.rows_at(1)
        mismatched = {name: getattr(others, name) for name in TENSORS} | dict(others.extras)
        extras = {f"{PREFIX}{name}": values for name, values in mismatched.items()}
        return replace(answers, extras={**answers.extras, **extras})

    def measure(self, batch: TokenBatch, model: Decoder, forward_sums: ForwardSums) -> TokenBatch:
        """Replaces the mismatched rows of a batch by their KL divergence, `kl_B`."""
        mismatched = {name: batch.extras[f"{PREFIX}{name}"] for name in TENSORS}
        # Extras are zeros in rows of padding, which would count as labels and pieces
        is_padding_B1 = (batch.segments_BT < 0).all(dim=1, keepdim=True)
        mismatched["labels_BT"] = mismatched["labels_BT"].masked_fill(is_padding_B1, IGNORED)
        mismatched["segments_BT"] = mismatched["segments_BT"].masked_fill(is_padding_B1, -1)
        reference = {"reference_BT": batch.extras[f"{PREFIX}reference_BT"]}

        def log_ratios(output: Tensor, rows: TokenBatch) -> Tensor:
            """Sum of the answers' log-ratios of policy and reference, and number of answers, [2]."""
            log_ratios_BT = model.token_log_probs(output, rows.labels_BT) - rows.extras["reference_BT"]
            lengths_BS = piece_sums(rows.labels_BT != IGNORED, rows.segments_BT, count_pieces(rows.segments_BT))
            return torch.stack([log_ratios_BT.double().sum(), (lengths_BS > 0).sum().double()])

        kl_sum, count = forward_sums(TokenBatch(**mismatched, extras=reference, group_size=1), log_ratios, size=2)
        # A KL divergence is not negative, but the mean of a sample may be
        kl = (kl_sum / count.clamp(min=1)).clamp(min=0).to(batch.extras["reference_BT"].dtype)
        extras = {name: values for name, values in batch.extras.items() if not name.startswith(PREFIX)}
        return replace(batch, extras={**extras, "kl_B": kl.to(batch.labels_BT.device).expand(batch.num_rows)})

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        num_pieces = count_pieces(batch.segments_BT)
        return {KTO_LOSS: (piece_sums(batch.labels_BT != IGNORED, batch.segments_BT, num_pieces) > 0).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        log_probs_BT, segments_BT = model.token_log_probs(output, batch.labels_BT), batch.segments_BT
        num_pieces = count_pieces(segments_BT)
        is_answer_BS = piece_sums(batch.labels_BT != IGNORED, segments_BT, num_pieces) > 0
        is_desirable_A = (piece_sums(batch.extras["values_BT"], segments_BT, num_pieces) > 0)[is_answer_BS]
        log_ratios_A = piece_sums(log_probs_BT - batch.extras["reference_BT"], segments_BT, num_pieces)[is_answer_BS]
        kl_A = batch.extras["kl_B"][:, None].expand(is_answer_BS.shape)[is_answer_BS]
        weights = log_ratios_A.new_tensor([self.config.undesirable_weight, self.config.desirable_weight])
        weights_A = weights[is_desirable_A.long()]
        gains_A = torch.where(is_desirable_A, log_ratios_A - kl_A, kl_A - log_ratios_A)
        losses_A = weights_A * (1 - torch.sigmoid(self.config.beta * gains_A))
        metrics = absent(self.metric_names, output.device)
        log_probs_A = piece_sums(log_probs_BT.detach(), segments_BT, num_pieces)[is_answer_BS]
        values = {"rewards": self.config.beta * log_ratios_A.detach(), "logps": log_probs_A}
        for side, is_own_A in (("chosen", is_desirable_A), ("rejected", ~is_desirable_A)):
            metrics |= {f"{name}/{side}": _mean(values_A, is_own_A) for name, values_A in values.items()}
        is_real_B = (segments_BT >= 0).any(dim=1)
        return Terms({KTO_LOSS: losses_A.sum()}, metrics | {"kl": _mean(batch.extras["kl_B"], is_real_B)})


def _mean(values: Tensor, chosen: Tensor) -> Metric:
    return (values * chosen).sum(), chosen.sum()


HEAD = "score"
"""Name of the head in `Decoder.heads`."""


@dataclass(frozen=True)
class RewardModel:
    """A frozen model with a head that computes a token's reward."""

    frozen: FrozenModel

    @property
    def config(self) -> ModelConfig:
        return self.frozen.executor.model.config

    def score(self, batch: TokenBatch, *, num_parts: int = 1) -> Tensor:
        """Reward at the last token of every row, that of its last piece, [B] in FP32 at least; 0 for a row of padding.
        num_parts: number of chunks in which the rows are processed.
        """
        scores_BS = self.piece_scores(batch, num_parts=num_parts)
        if not scores_BS.shape[1]:
            return scores_BS.new_zeros(batch.num_rows)
        last_B = batch.segments_BT.to(scores_BS.device).amax(dim=1)
        return scores_BS.gather(1, last_B.clamp(min=0).long()[:, None])[:, 0] * (last_B >= 0)

    def piece_scores(self, batch: TokenBatch, *, num_parts: int = 1) -> Tensor:
        """Reward at the last token of every piece, [B, S] in FP32 at least; 0 for pieces that a row lacks."""
        rewards_BT = self.frozen.head_output(HEAD, batch, num_parts=num_parts)[..., 0]
        segments_BT = batch.segments_BT.to(rewards_BT.device)
        return piece_sums(rewards_BT * piece_ends(segments_BT), segments_BT, count_pieces(segments_BT))


ALONE = single()


def load_reward_model(folder: Path, world: World = ALONE) -> RewardModel:
    """Read a sequence classification with one label. Raises `ModelError` for a folder of another kind."""
    return reward_model(load_sequence_classifier(folder, head=HEAD), world)


def reward_model(model: Decoder, world: World = ALONE) -> RewardModel:
    """Returns a frozen copy of a model that has the head."""
    return RewardModel(FrozenModel(model, world))


PAIRWISE, CENTER = "pairwise", "center"
"""Names of the loss terms."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TrainConfig):
    """Training of a reward model on preference pairs."""

    learning_rate: float = 1e-5
    """Peak learning rate."""
    center_rewards_coefficient: float = 0.0
    """Weight of the mean of (chosen + rejected)^2, which centers rewards (Eisenstein et al. 2023); 0.01 is usual."""
    use_margins: bool = False
    """Require a chosen answer to be better by the `margin` of its record (Touvron et al. 2023, section 3.2.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficient = self.center_rewards_coefficient
        if coefficient < 0:
            raise ConfigError(f"center_rewards_coefficient: must not be negative, got {coefficient}; 0.01 is usual")


@dataclass(frozen=True)
class RewardModeling(Objective):
    """Logistic loss of the difference of two rewards, all pairs with equal weights."""

    # It is the binary cross-entropy of "the chosen answer is better" with that difference as its logit
    needs = frozenset({WHOLE_ROWS})
    metric_names = ("accuracy", "margin", "mean_reward")
    source: BatchSource
    config: RewardModelConfig

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        head = nn.Linear(config.model_dim, 1, bias=False)
        nn.init.normal_(head.weight, std=config.init_std)
        return {HEAD: head}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return numbered_batches(self.source, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        count = Pairs.of(batch).count
        return {PAIRWISE: count, CENTER: count} if self.config.center_rewards_coefficient else {PAIRWISE: count}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        pairs, ends_BT = Pairs.of(batch), piece_ends(batch.segments_BT)
        rewards = pairs.sums(model.head_output(HEAD, output)[..., 0] * ends_BT)
        differences_P = rewards.chosen - rewards.rejected
        required_P = pairs.sums(batch.extras["values_BT"] * ends_BT).chosen if self.config.use_margins else 0.0
        losses = {PAIRWISE: -F.logsigmoid(differences_P - required_P).sum()}
        if self.config.center_rewards_coefficient:
            squares_P = (rewards.chosen + rewards.rejected).square()
            losses[CENTER] = self.config.center_rewards_coefficient * squares_P.sum()
        metrics = {
            "accuracy": shares_right(differences_P),
            "margin": differences_P,
            "mean_reward": (rewards.chosen + rewards.rejected) / 2,
        }
        return Terms(losses, pairs.means(metrics))


ROWS_AT_ONCE = 16
MODEL = "model"
"""Kind of such a reward."""


@dataclass(frozen=True, kw_only=True)
class ModelRewardConfig:
    """Score of a reward model."""

    path: str = ""
    """Folder of a sequence classification with one label and its tokenizer, such as the stage `reward` writes. "" is
    the reward model that the same run has trained before."""

    def __post_init__(self) -> None:
        if self.path and not Path(self.path).is_dir():
            raise ConfigError(f"path: no such folder: {self.path!r} (looked for in {Path.cwd()})")

    def build(self, name: str) -> Reward:
        if not self.path:
            raise ConfigError("path: names no folder; give that of a reward model")
        folder = Path(self.path)
        model = load_reward_model(folder, single(default_device()))
        return ModelReward(name, Tokenizer.load(folder), model.config.max_seq_len, model.score)


@dataclass(frozen=True)
class ModelReward:
    """Scores conversations that end with the answer.

    max_len: tokens of the longest conversation that the model can score. score_rows: returns the reward at the last
    token of each row, [B].
    """

    name: str
    tokenizer: Tokenizer
    max_len: int
    score_rows: Callable[[TokenBatch], Tensor]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns a score for each sample; a conversation that is longer than the model's context is a failure."""
        ids: list[np.ndarray] = []
        for sample in samples:
            messages = [*sample.prompt, {"role": "assistant", "content": sample.answer}]
            tokens, mask = self.tokenizer.chat.encode_chat(messages)
            # Up to the end of the answer: templates may add text after it; an answer that was cut off has no end token
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(tokens)
            cut_off = sample.finish_reason != "stop" and int(tokens[end - 1]) in self.tokenizer.stop_ids
            ids.append(tokens[: end - cut_off])
        too_long = f"the conversation has more tokens than the context of the reward model, {self.max_len}"
        scores = [Score.failure("too_long", too_long)] * len(samples)
        fitting = [number for number, one in enumerate(ids) if len(one) <= self.max_len]
        for first in range(0, len(fitting), ROWS_AT_ONCE):
            numbers = fitting[first : first + ROWS_AT_ONCE]
            rewards = self.score_rows(rows_of([ids[number] for number in numbers])).tolist()
            for number, reward in zip(numbers, rewards, strict=True):
                scores[number] = Score(reward)
        return scores


def rows_of(ids: Sequence[np.ndarray]) -> TokenBatch:
    """Builds a row for each conversation, padded at the end."""
    shape = (len(ids), max(map(len, ids)))
    input_ids_BT = torch.zeros(shape, dtype=torch.int64)
    segments_BT = torch.full(shape, -1, dtype=torch.int32)
    for row, one in enumerate(ids):
        input_ids_BT[row, : len(one)] = torch.from_numpy(one)
        segments_BT[row, : len(one)] = 0
    return TokenBatch(
        input_ids_BT=input_ids_BT,
        labels_BT=torch.full(shape, IGNORED, dtype=torch.int64),
        # 0 in padding, as in packed rows
        positions_BT=torch.arange(shape[1]).expand(shape).contiguous() * (segments_BT >= 0),
        segments_BT=segments_BT,
    )


MODEL_REWARDS: Mapping[str, type[RewardConfig]] = {**REWARDS, MODEL: ModelRewardConfig}
"""All kinds of rewards, by rules and by a model."""


def model_terms(terms: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the options of the reward models among the terms of a sum, by the name of the term."""
    options = {name: one for name, one in terms.items() if isinstance(one, Mapping)}
    return {name: one for name, one in options.items() if one.get("kind", name) == MODEL}


def reward_model_folders(terms: Mapping[str, Any]) -> dict[str, str]:
    """Returns the folders of the reward models among the terms of a sum, by the setting that names each."""
    return {f"rewards.{name}.path": str(one["path"]) for name, one in model_terms(terms).items() if one.get("path")}


def without_folder(terms: Mapping[str, Any]) -> list[str]:
    """Returns the names of the terms that use the run's own reward model."""
    return [name for name, one in model_terms(terms).items() if not one.get("path")]


def with_folder(terms: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the terms of a sum with the reward model of `folder` in place of the run's own."""
    return {**terms, **{name: {**terms[name], "path": str(folder)} for name in without_folder(terms)}}
