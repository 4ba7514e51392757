"""Group-relative policy optimization: each of several completions of a prompt is rated relative to the others.

GRPO (Shao et al. 2024, arXiv 2402.03300), with the changes of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) and DAPO (Yu
et al. 2025, arXiv 2503.14476) and the baseline of RLOO (Ahmadian et al. 2024, arXiv 2402.14740) as settings. Names of
settings and metrics are those of TRL. docs/techniques/grpo.md explains both.

Legend: P prompts, G completions of each, C = P * G, T places (see `experience.py`), B rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.core.config import ConfigError, constant
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives import advantages
from modelwright.objectives.experience import Experience, RolloutObjective
from modelwright.objectives.rollouts import Rollout, RolloutConfig, check_rollout_training, is_heldout, rollout_metrics
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Metric, Terms

LossType = Literal["grpo", "dapo", "dr_grpo"]
CLIP_NAMES = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(TrainConfig):
    """Group-relative policy optimization on prompts with rewards. An update learns from `batch_tokens / pack.seq_len`
    completions."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms do not decay."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: dict[str, Any] = field(default_factory=dict, hash=False)
    """Terms of the reward by name, each with its options, `kind` and `weight`; docs/rewards.md lists the kinds. Without
    any, answers are scored by the reward model that the run has trained before, or else by `exact_match`."""
    num_generations: int = 8
    """Completions of each prompt: the group."""
    steps_per_generation: int = constant(1)
    """Updates for one pass over a rollout, each from another part of it."""
    num_iterations: int = constant(1)
    """Number of passes over each rollout (the GRPO paper's mu)."""
    epsilon: float = 0.2
    """The ratio of probabilities is clipped to at least 1 - epsilon."""
    epsilon_high: float = 0.2
    """The ratio is clipped to at most 1 + epsilon_high; 0.28 in DAPO."""
    beta: float = 0.0
    """Weight of the KL divergence from the model that training began with; 0 needs no reference model."""
    loss_type: LossType = "dapo"
    """Averaging of token losses: `grpo` over each completion, then over completions; `dapo` over all tokens of the
    update; `dr_grpo` divides by the number of completions times `rollout.max_completion_length`."""
    scale_rewards: advantages.RewardScale = "group"
    """Divisor of rewards: their standard deviation in the `group` or the whole `batch`, or `none` (Dr. GRPO)."""
    baseline: advantages.Baseline = "group_mean"
    """Baseline of a reward: the mean of its group, or of the others of its group (`leave_one_out`, RLOO)."""
    resampling_rounds: int = constant(0)
    """Maximum rounds that replace groups with equal rewards (dynamic sampling of DAPO); 0 keeps such groups."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rollout_training(self.batching)
        if self.num_generations < 2:
            raise ConfigError(f"num_generations: a group needs at least 2 completions, got {self.num_generations}")
        for name in ("steps_per_generation", "num_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if not 0 < self.epsilon < 1 or self.epsilon_high <= 0:
            raise ConfigError(
                f"epsilon: must be between 0 and 1, and epsilon_high above 0; got {self.epsilon}, {self.epsilon_high}"
            )
        for name in ("beta", "resampling_rounds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")


@dataclass(kw_only=True)
class Grpo(RolloutObjective):
    """Rolls out, and learns from each rollout in `num_iterations * steps_per_generation` updates."""

    config: GrpoConfig

    def __post_init__(self) -> None:
        config = self.config
        if self.num_completions * config.steps_per_generation % config.num_generations:
            raise ConfigError(
                f"num_generations: groups of {config.num_generations} do not make up the "
                f"{self.num_completions * config.steps_per_generation} completions of a rollout "
                "(batch_tokens / pack.seq_len * steps_per_generation); change one of them"
            )
        self.buffer = self.new_buffer(num_epochs=config.num_iterations, num_minibatches=config.steps_per_generation)

    @property
    def metric_names(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        own = ["reward_std", "frac_reward_zero_std", "sampling/rounds", *CLIP_NAMES, "entropy"]
        return [*self.heldout.metric_names, *own, *(["kl"] if self.config.beta else [])]

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        if is_heldout(batch):
            return {"policy": self.heldout.weight(batch)}
        return {"policy": batch.extras["normalizers_BT"].double().sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        if is_heldout(batch):
            nothing = self.constant_metrics(output, with_rollout=False)
            return Terms({"policy": self.heldout.loss(batch)}, {**nothing, **self.heldout.metrics(batch)})
        extras, mask_BT = batch.extras, batch.labels_BT != IGNORED
        log_probs_BT, entropies_BT = model.token_log_probs_and_entropies(output, batch.labels_BT)
        policy = advantages.clipped_policy_loss(
            log_probs_BT,
            extras["old_log_probs_BT"],
            extras["advantages_BT"],
            low=self.config.epsilon,
            high=self.config.epsilon_high,
        )
        losses_BT, count = policy.losses, mask_BT.sum()
        low, high = (policy.clipped_low & mask_BT).sum(), (policy.clipped_high & mask_BT).sum()
        metrics: dict[str, Metric] = dict(
            zip(CLIP_NAMES, ((low, count), (high, count), (low + high, count)), strict=True)
        )
        metrics["entropy"] = ((entropies_BT.detach() * mask_BT).sum(), count)
        if self.config.beta:
            kl_BT = advantages.kl_k3(log_probs_BT, extras["reference_log_probs_BT"])
            losses_BT = losses_BT + self.config.beta * kl_BT
            metrics["kl"] = ((kl_BT.detach() * mask_BT).sum(), count)
        loss = (losses_BT * extras["loss_weights_BT"] * mask_BT).sum()
        return Terms({"policy": loss}, {**self.constant_metrics(output, with_rollout=True), **metrics})

    def new_experience(self, model: Decoder) -> Experience:
        """Roll out, and keep the completions with an advantage."""
        with self.layout.whole_model(model) as whole:
            rollout, metrics = self._roll_out(whole)
        rewards_PG = rollout.rewards_C.view(-1, self.config.num_generations)
        advantages_C = advantages.group_advantages(
            rewards_PG, baseline=self.config.baseline, scale=self.config.scale_rewards
        ).flatten()
        kept = advantages_C.isfinite().nonzero().flatten()
        rollout, advantages_C = rollout.take(kept), advantages_C[kept]
        # Factors of the token losses of each completion, and each token's share of the divisor of their sum
        lens_C = rollout.completion_lens_C.double()
        weights_C = rollout.stopped_C.double() if self.config.rollout.mask_truncated else torch.ones_like(lens_C)
        normalizers_C = weights_C
        if self.config.loss_type == "grpo":
            weights_C = normalizers_C = weights_C / lens_C
        elif self.config.loss_type == "dr_grpo":
            normalizers_C = weights_C * self.config.rollout.max_completion_length / lens_C
        of_completions = {"advantages": advantages_C, "loss_weights": weights_C, "normalizers": normalizers_C}
        extras_CT = {name: values_C.float()[:, None] * rollout.mask_CT for name, values_C in of_completions.items()}
        extras_CT["old_log_probs"] = rollout.log_probs_CT
        if self.config.beta:
            extras_CT["reference_log_probs"] = self.reference.log_probs(rollout, self.layout.world)
        return Experience.of(rollout, extras_CT, metrics)

    def _roll_out(self, whole: Decoder) -> tuple[Rollout, dict[str, float]]:
        """Generates the groups of an update, fewer if too many have equal rewards, and figures of all completions."""
        config = self.config
        num_groups = self.num_completions * config.steps_per_generation // config.num_generations
        most = num_groups * config.num_generations
        generated, kept = list[Rollout](), list[Rollout]()
        while len(generated) <= config.resampling_rounds and sum(one.num_completions for one in kept) < most:
            rollout = self.roll_out(whole, num_groups, num_generations=config.num_generations, more=(len(generated),))
            generated.append(rollout)
            if config.resampling_rounds:
                # Groups with equal rewards have advantages of zero, so nothing would be learned from them
                unequal_P = advantages.differs(rollout.rewards_C.view(-1, config.num_generations))
                rollout = rollout.take(unequal_P.repeat_interleave(config.num_generations))
            kept.append(rollout)
        everything, chosen = Rollout.joined(generated), Rollout.joined(kept)
        self.show(everything)
        chosen = chosen.take(torch.arange(min(chosen.num_completions, most)))
        rewards_PG = everything.rewards_C.view(-1, config.num_generations)
        stds_P = advantages.group_stds(rewards_PG)
        known_P = stds_P.isfinite()
        figures = {**rollout_metrics(everything, self.worker.term_names), "sampling/rounds": float(len(generated))}
        if known_P.any():
            figures["reward_std"] = float(stds_P[known_P].mean())
            figures["frac_reward_zero_std"] = float((~advantages.differs(rewards_PG)[known_P]).double().mean())
        return chosen, figures
