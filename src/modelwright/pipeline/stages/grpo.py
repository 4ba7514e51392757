"""grpo: reinforcement learning from rewards by rules, with groups of completions as their own baseline."""

from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.rollout_training import rollout_parts, rollout_training


def _objective(inputs: StageInputs) -> Grpo:
    config = inputs.training
    assert isinstance(config, GrpoConfig)
    return Grpo(config=config, **vars(rollout_parts(inputs, "grpo", config.rollout, config.rewards)))


GRPO = rollout_training(
    name="grpo",
    title="Reinforcement learning from groups of completions (GRPO)",
    report_title="GRPO",
    model_title="GRPO",
    objective=_objective,
    config=GrpoConfig,
    updates_per_row=lambda config: config.num_generations * config.num_iterations,
    charts={
        "kl": "KL from the start, nats per token",
        "entropy": "nats per token",
        "clip_ratio/region_mean": "share of clipped tokens",
        "completions/mean_length": "tokens",
        "frac_reward_zero_std": "share of groups",
    },
)
