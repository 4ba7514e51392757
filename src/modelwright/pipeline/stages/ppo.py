"""ppo: reinforcement learning from rewards with a value head and a penalty on the distance from the start."""

from modelwright.objectives.ppo import Ppo, PpoConfig
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.rollout_training import rollout_parts, rollout_training


def _objective(inputs: StageInputs) -> Ppo:
    config = inputs.training
    assert isinstance(config, PpoConfig)
    return Ppo(config=config, **vars(rollout_parts(inputs, "ppo", config.rollout, config.rewards)))


PPO = rollout_training(
    name="ppo",
    title="Reinforcement learning with a value head (PPO)",
    report_title="PPO",
    model_title="PPO",
    objective=_objective,
    config=PpoConfig,
    updates_per_row=lambda config: config.num_ppo_epochs,
    charts={
        "objective/kl": "KL from the start, nats per completion",
        "objective/kl_coef": "weight of the KL penalty",
        "policy/entropy_avg": "nats per token",
        "policy/clipfrac_avg": "share of clipped tokens",
        "loss/value_avg": "value loss",
        "completions/mean_length": "tokens",
    },
)
