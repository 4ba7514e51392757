"""ppo: reinforcement learning from rewards with a value head and a penalty on the distance from the start."""

from modelwright.objectives.model_reward import model_terms, reward_model_folders
from modelwright.objectives.ppo import Ppo, PpoConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.rollout_training import reward_terms, rollout_parts, rollout_training
from modelwright.pipeline.stages.training import FrozenModels


def _objective(inputs: StageInputs) -> Ppo:
    config = inputs.training
    assert isinstance(config, PpoConfig)
    return Ppo(config=config, **vars(rollout_parts(inputs, PPO.name, config.rollout)))


def _frozen(run: RunConfig, config: PpoConfig) -> FrozenModels:
    terms = reward_terms(run, PPO.name)
    count = int(config.kl_coef > 0) + len(model_terms(terms))
    num_forwards = (2 + count) / config.num_ppo_epochs  # completions and values
    return FrozenModels(num_models=count, num_forwards=num_forwards, folders=reward_model_folders(terms))


PPO = rollout_training(
    name="ppo",
    title="Reinforcement learning with a value head (PPO)",
    report_title="PPO",
    model_title="PPO",
    objective=_objective,
    config=PpoConfig,
    updates_per_row=lambda config: config.num_ppo_epochs,
    frozen=_frozen,
    charts={
        "KL from the start, nats per completion": {"objective/kl": "rollouts"},
        "Weight of the KL penalty": {"objective/kl_coef": "rollouts"},
        "Entropy, nats per token": {"policy/entropy_avg": "updates"},
        "Share of clipped tokens": {"policy/clipfrac_avg": "updates"},
        "Value loss": {"loss/value_avg": "updates"},
        "Mean length of completions, tokens": {"completions/mean_length": "rollouts"},
    },
    kl_metric="objective/kl",
)
