"""grpo: reinforcement learning from rewards by rules, with groups of completions as their own baseline."""

from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.objectives.preference import model_terms, reward_model_folders
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.rollout_training import reward_terms, rollout_parts, rollout_training
from modelwright.pipeline.stages.training import FurtherModels


def _further(run: RunConfig, config: GrpoConfig) -> FurtherModels:
    terms = reward_terms(run, GRPO.name)
    count = int(config.beta > 0) + len(model_terms(terms))
    num_forwards = (1 + count) / config.num_iterations  # 1: generation of the completion
    return FurtherModels(num_models=count, num_forwards=num_forwards, folders=reward_model_folders(terms))


GRPO = rollout_training(
    name="grpo",
    title="Reinforcement learning from groups of completions (GRPO)",
    report_title="GRPO",
    model_title="GRPO",
    objective=lambda inputs: Grpo(
        config=inputs.training, **vars(rollout_parts(inputs, "grpo", inputs.training.rollout))
    ),
    config=GrpoConfig,
    updates_per_row=lambda config: config.num_generations * config.num_iterations,
    further=_further,
    charts={
        "KL from the start, nats per token": {"kl": "updates"},
        "Entropy, nats per token": {"entropy": "updates"},
        "Share of clipped tokens": {"clip_ratio/region_mean": "updates"},
        "Mean length of completions, tokens": {"completions/mean_length": "rollouts"},
        "Share of groups with equal rewards": {"frac_reward_zero_std": "rollouts"},
    },
    kl_metric="kl",
)
