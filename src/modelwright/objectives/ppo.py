"""Proximal policy optimization of a language model (Schulman et al. 2017, arXiv 1707.06347; Ziegler et al. 2019, arXiv
1909.08593; Ouyang et al. 2022, arXiv 2203.02155), with its value function: a head on the policy, or a separate model.

Names of settings and metrics are those of TRL's PPOTrainer. docs/techniques/ppo.md links each implementation detail
to its function here.

Legend: C completions, T places (see `experience.py`), B rows, D model width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS, Feature, feature
from modelwright.core.config import ConfigError, constant
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model import hf
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives import advantages
from modelwright.objectives.experience import ROWS_AT_ONCE, Experience, RolloutObjective, values_of_places
from modelwright.objectives.preference import HEAD
from modelwright.objectives.rollouts import Rollout, RolloutConfig, check_rollout_training, is_heldout, rollout_metrics
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Metric, Terms, forward
from modelwright.train.work import dense_flops, head_flops

VALUE = "value"
"""Name of the value function in `Decoder.heads`."""


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


class ValueOnTrunk:
    """A `ValueHead` on the hidden states of the policy, whose layers learn from both losses."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Required properties of a run, as for an objective."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        """Returns the module `VALUE` for a policy of this shape; it maps `inputs` to values [B, T]."""
        return {VALUE: ValueHead(config.model_dim)}

    def inputs(self, batch: TokenBatch, hidden: Callable[[], Tensor]) -> Tensor:
        """Returns the module's input. hidden: computes the hidden states of the policy [B, T, D] for the batch."""
        return hidden()

    def flops(self, batch: TokenBatch) -> float:
        """FLOPs of forward and backward in an update; 0 because they are negligible against the policy's."""
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
class SeparateValueModel:
    """A separate model, all of whose weights are trained, as in InstructGPT (Ouyang et al. 2022, section 3.5) and TRL's
    PPOTrainer: policy and value losses have separate weights. It is neither divided along the tokens of a row, nor
    scaled layer by layer.
    """

    needs: ClassVar[frozenset[str]] = frozenset({WHOLE_ROWS})
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
            hf.set_parameter(trunk, name, start.get_parameter(name).detach())
        model = ValueModel(trunk)
        if HEAD in start.heads:
            hf.set_parameter(model.head, "linear.weight", start.heads.get_parameter(f"{HEAD}.weight").detach().clone())
        return {VALUE: model}

    def inputs(self, batch: TokenBatch, hidden: Callable[[], Tensor]) -> Tensor:
        # One tensor, because `Decoder.head_output` passes one
        return torch.stack([batch.input_ids_BT, batch.positions_BT, batch.segments_BT.to(batch.input_ids_BT.dtype)])

    def flops(self, batch: TokenBatch) -> float:
        return float(dense_flops(self.shape, batch) - 3 * head_flops(self.shape, batch))


def separate_value_model(folder: Path) -> SeparateValueModel:
    """Returns a value model that starts from a folder. Raises `ModelError` as `load_model` does."""
    # A reward model's weights, its head included, or a language model's
    load = partial(hf.load_sequence_classifier, folder, head=HEAD) if hf.is_sequence_classifier(folder) else None
    return SeparateValueModel(shape=hf.load_config(folder), load=load or partial(hf.load_model, folder))


MAX_ERROR = 0.2
"""Largest relative error of the KL that the controller reacts to (Ziegler et al. 2019, section 2.2)."""


@dataclass(kw_only=True)
class KlController:
    """Weight of the KL penalty: fixed, or adapted by a proportional controller until the KL of a completion is `target`
    (Ziegler et al. 2019, section 2.2, and the adaptive controller of lm-human-preferences).

    coefficient: the current weight; target: nats, 0 keeps the weight; horizon: completions over which it adapts.
    """

    coefficient: float
    target: float
    horizon: int

    def update(self, kl: float, num_completions: int) -> None:
        """Adapt the weight to the mean KL of `num_completions` completions."""
        if self.target:
            error = min(MAX_ERROR, max(-MAX_ERROR, kl / self.target - 1))
            self.coefficient *= 1 + error * num_completions / self.horizon


@dataclass(kw_only=True)
class RunningMoments:
    """Mean and variance of all scores so far, accumulated in batches (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    def add(self, scores: Tensor) -> None:
        if not len(scores):
            return
        mean = float(scores.double().mean())
        total, difference = self.count + len(scores), mean - self.mean
        self.squares += float((scores.double() - mean).square().sum())
        self.squares += difference**2 * self.count * len(scores) / total
        self.mean += difference * len(scores) / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation (divisor n - 1); 1 while there are fewer than two different scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 and self.squares else 1.0


def completion_scores(
    rollout: Rollout, moments: RunningMoments | None, *, clip: float, missing_eos_penalty: float
) -> Tensor:
    """Score of each completion [C] float64: its reward with penalty, normalized if `moments`, clipped if `clip`."""
    scores_C = rollout.rewards_C - missing_eos_penalty * (~rollout.stopped_C).double()
    if moments is not None:
        # Added first: the scores of the first rollout are normalized by their own moments
        moments.add(scores_C)
        scores_C = (scores_C - moments.mean) / moments.std
    return scores_C.clamp(-clip, clip) if clip else scores_C


ROLLOUT_NAMES = (
    "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores",
    "objective/kl_coef", "val/num_eos_tokens",
)  # fmt: skip
UPDATE_NAMES = (
    "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg",
    "val/clipfrac_avg", "val/ratio",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PpoConfig(TrainConfig):
    """Proximal policy optimization on prompts with rewards. An update learns from `batch_tokens / pack.seq_len`
    completions, one of each prompt."""

    learning_rate: float = 3e-6
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms do not decay."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: dict[str, Any] = field(default_factory=dict, hash=False)
    """Terms of the reward by name, each with its options, `kind` and `weight`; docs/rewards.md lists the kinds. Without
    any, answers are scored by the reward model that the run has trained before, or else by `exact_match`."""
    num_ppo_epochs: int = 4
    """Number of passes over each rollout."""
    num_mini_batches: int = 1
    """Updates of an epoch, each from another part of the rollout."""
    cliprange: float = 0.2
    """The ratio of probabilities is clipped to 1 +- cliprange."""
    cliprange_value: float = constant(0.2)
    """Most that a value may differ from that at the time of the rollout before its loss is clipped; the value of
    lm-human-preferences and TRL, which suits scores of variance 1 (`normalize_rewards`)."""
    value_model: Literal["head", "reward", "policy"] = "head"
    """Value function: a `head` on the policy's hidden states, or a separate model, which starts with the weights of the
    reward model (`reward`) or of the policy (`policy`) and needs as much memory as the policy."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    entropy_coef: float = constant(0.0)
    """Weight of the entropy bonus; 0 for none."""
    gamma: float = constant(1.0)
    """Discount of later rewards. An answer's score comes with its end, so that values below 1 favor short answers."""
    lam: float = 0.95
    """Lambda of generalized advantage estimation."""
    kl_coef: float = 0.05
    """Initial weight of the KL penalty in the reward of each token; 0 disables it and needs no reference model."""
    kl_target: float = constant(0.0)
    """Target KL of a completion, in nats, for `kl_coef` (Ziegler et al. 2019, section 2.2); 0 keeps the weight."""
    kl_horizon: int = constant(10_000)
    """Completions over which the weight of the penalty adapts."""
    target_kl: float = constant(0.0)
    """Approximate KL of an update, in nats per token, above which the rest of a rollout is skipped; 0 for no limit."""
    whiten_rewards: bool = False
    """Divide the rewards of tokens by their standard deviation."""
    normalize_rewards: bool = constant(False)
    """Normalize the scores of completions to mean 0 and variance 1, over all rollouts so far."""
    reward_clip: float = constant(0.0)
    """Limit of scores, which are clipped to +- this; 0 does not clip."""
    missing_eos_penalty: float = 0.0
    """Penalty that is subtracted from the score of a completion without an end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rollout_training(self.batching)
        for name in ("num_ppo_epochs", "num_mini_batches", "kl_horizon"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be from 0 to 1, got {getattr(self, name)}")
        if not 0 < self.cliprange < 1:
            raise ConfigError(f"cliprange: must be between 0 and 1, got {self.cliprange}")
        names = ("vf_coef", "entropy_coef", "kl_coef", "kl_target", "target_kl", "reward_clip", "missing_eos_penalty")
        for name in names:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")
        if self.kl_target and not self.kl_coef:
            raise ConfigError("kl_target: adapts kl_coef, which is 0 and stays 0; set it above 0")

    def features(self) -> list[Feature]:
        if self.value_model == "head":
            return super().features()
        return [*super().features(), feature("value_model", self.value_model, needs=SeparateValueModel.needs)]


@dataclass(kw_only=True)
class Ppo(RolloutObjective):
    """Rolls out, and learns from each rollout in `num_ppo_epochs * num_mini_batches` updates."""

    config: PpoConfig
    value: ValueOnTrunk | SeparateValueModel = field(default_factory=ValueOnTrunk)
    moments: RunningMoments = field(default_factory=RunningMoments)
    """Mean and variance of the scores of all rollouts so far."""
    kl: KlController = field(init=False)
    update_kl: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and count of the approximate KL of the newest update on this rank, until all ranks have added them up."""

    def __post_init__(self) -> None:
        config = self.config
        self.kl = KlController(coefficient=config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)
        self.buffer = self.new_buffer(num_epochs=config.num_ppo_epochs, num_minibatches=config.num_mini_batches)

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return RolloutObjective.needs | self.value.needs

    @property
    def metric_names(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [*self.heldout.metric_names, *ROLLOUT_NAMES, *UPDATE_NAMES]

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return self.value.own_modules(config)

    def own_flops(self, batch: TokenBatch) -> float:
        return 0.0 if is_heldout(batch) else self.value.flops(batch)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        if is_heldout(batch):
            weight = self.heldout.weight(batch)
            return {"policy": weight, VALUE: torch.zeros_like(weight)}
        num_tokens = (batch.labels_BT != IGNORED).sum()
        return {"policy": num_tokens, VALUE: num_tokens}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        if is_heldout(batch):
            loss = self.heldout.loss(batch)
            metrics = {**self.constant_metrics(output, with_rollout=False), **self.heldout.metrics(batch)}
            return Terms({"policy": loss, VALUE: torch.zeros_like(loss)}, metrics)
        config, extras, mask_BT = self.config, batch.extras, batch.labels_BT != IGNORED
        log_probs_BT, entropies_BT = model.token_log_probs_and_entropies(output, batch.labels_BT)
        old_BT = extras["old_log_probs_BT"]
        policy = advantages.clipped_policy_loss(
            log_probs_BT, old_BT, extras["advantages_BT"], low=config.cliprange, high=config.cliprange
        )
        values_BT = model.head_output(VALUE, self.value.inputs(batch, lambda: output))
        value_losses_BT, value_clipped_BT = advantages.clipped_value_loss(
            values_BT, extras["old_values_BT"], extras["returns_BT"], cliprange=config.cliprange_value
        )
        detached_BT = log_probs_BT.detach()
        count, figures = mask_BT.sum(), {
            "policy/approxkl_avg": advantages.kl_k2(detached_BT, old_BT),
            "policy/clipfrac_avg": policy.clipped_low | policy.clipped_high,
            "policy/entropy_avg": entropies_BT.detach(),
            "loss/policy_avg": policy.losses.detach(),
            "loss/value_avg": value_losses_BT.detach(),
            "val/clipfrac_avg": value_clipped_BT,
            "val/ratio": (detached_BT - old_BT).exp(),
        }  # fmt: skip
        metrics: dict[str, Metric] = {name: ((values * mask_BT).sum(), count) for name, values in figures.items()}
        if output.requires_grad:  # an update, not an evaluation
            self.update_kl[0] += float(metrics["policy/approxkl_avg"][0])
            self.update_kl[1] += float(count)
        policy_BT = policy.losses - config.entropy_coef * entropies_BT
        return Terms(
            {"policy": (policy_BT * mask_BT).sum(), VALUE: config.vf_coef * (value_losses_BT * mask_BT).sum()},
            {**self.constant_metrics(output, with_rollout=True), **metrics},
        )

    def state_dict(self) -> dict[str, Any]:
        self.before_minibatch()
        return {**super().state_dict(), "kl_coef": self.kl.coefficient, "moments": dict(vars(self.moments))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.kl.coefficient, self.moments = state["kl_coef"], RunningMoments(**state["moments"])

    def before_minibatch(self) -> None:
        """End the rollout if the KL of its newest update exceeds `target_kl`."""
        if not self.config.target_kl:
            return
        # Summed over ranks, so that all of them end the rollout or none
        total, count = self.layout.world.sums(self.update_kl)
        self.update_kl = [0.0, 0.0]
        if count and total / count > self.config.target_kl:
            self.buffer.position = self.buffer.num_epochs * self.buffer.num_minibatches

    def new_experience(self, model: Decoder) -> Experience:
        with self.layout.whole_model(model) as whole:
            rollout = self.roll_out(whole, self.num_completions * self.config.num_mini_batches, num_generations=1)
            self.show(rollout)
            figures = rollout_metrics(rollout, self.worker.term_names)
            rollout = rollout.take(rollout.scored_C)

            @torch.no_grad()
            def values(batch: TokenBatch) -> Mapping[str, Tensor]:
                parts = batch.to(whole.norm.weight.device).split(-(-batch.num_rows // ROWS_AT_ONCE))
                inputs = (self.value.inputs(part, partial(forward, whole, part)) for part in parts)
                return {VALUE: torch.cat([whole.head_output(VALUE, one) for one in inputs])}

            # The value before each generated token, 0 elsewhere; all ranks call together
            values_CT = values_of_places(rollout, self.layout.world, self.row_len, values)[VALUE].float()
        mask_CT = rollout.mask_CT
        scores_C = completion_scores(
            rollout,
            self.moments if self.config.normalize_rewards else None,
            clip=self.config.reward_clip,
            missing_eos_penalty=self.config.missing_eos_penalty,
        )
        kl_CT = torch.zeros_like(rollout.log_probs_CT)
        if self.config.kl_coef:
            kl_CT = (
                advantages.kl_k1(rollout.log_probs_CT, self.reference.log_probs(rollout, self.layout.world)) * mask_CT
            )
        rewards_CT = token_rewards(-self.kl.coefficient * kl_CT, scores_C, rollout)
        if rollout.num_completions:
            kl, score = float(kl_CT.double().sum(dim=1).mean()), float(scores_C.mean())
            penalty = -self.kl.coefficient * kl
            figures |= {
                "objective/kl": kl,
                "objective/entropy": float(-rollout.log_probs_CT.double().sum(dim=1).mean()),
                "objective/non_score_reward": penalty,
                "objective/rlhf_reward": penalty + score,
                "objective/scores": score,
                "objective/kl_coef": self.kl.coefficient,
                "val/num_eos_tokens": float(rollout.stopped_C.sum()),
            }
            # After the rewards and figures of this rollout, which have the weight before the update
            self.kl.update(kl, rollout.num_completions)
        # As in TRL, rewards are scaled but not shifted, advantages are both
        if self.config.whiten_rewards:
            rewards_CT = advantages.whitened(rewards_CT, mask_CT, shift_mean=False)
        advantages_CT, returns_CT = advantages.generalized_advantages(
            rewards_CT, values_CT, mask_CT, gamma=self.config.gamma, lam=self.config.lam
        )
        extras_CT = {
            "old_log_probs": rollout.log_probs_CT,
            "advantages": advantages.whitened(advantages_CT, mask_CT),
            "returns": returns_CT,
            "old_values": values_CT,
        }
        return Experience.of(rollout, extras_CT, figures)


def token_rewards(penalties_CT: Tensor, scores_C: Tensor, rollout: Rollout) -> Tensor:
    """Reward of each token [C, T]: its penalty, and at the last token the score of the completion."""
    rewards_CT = penalties_CT.clone()
    # Place t predicts token t + 1, so the last of n tokens has place n - 2
    rewards_CT[torch.arange(rollout.num_completions), rollout.lens_C - 2] += scores_C.to(rewards_CT.dtype)
    return rewards_CT
