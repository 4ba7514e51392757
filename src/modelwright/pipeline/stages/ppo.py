"""ppo: reinforcement learning from rewards with a value function and a penalty on the distance from the start."""

from pathlib import Path

from modelwright.core.config import ConfigError
from modelwright.data.tokenizer.tokenizer import Tokenizer, tokenizer_difference
from modelwright.objectives.ppo import Ppo, PpoConfig, ValueOnTrunk, separate_value_model
from modelwright.objectives.preference import model_terms, reward_model_folders, without_folder
from modelwright.pipeline.stage import RunConfig, StageInputs
from modelwright.pipeline.stages.pack import model_before, reward_model_before, tokenizer_stage
from modelwright.pipeline.stages.reward import REWARD
from modelwright.pipeline.stages.rollout_training import reward_terms, rollout_parts, rollout_training
from modelwright.pipeline.stages.training import FurtherModels


def _objective(inputs: StageInputs) -> Ppo:
    config: PpoConfig = inputs.training
    parts = rollout_parts(inputs, PPO.name, config.rollout)
    if config.value_model == "head":
        return Ppo(config=config, value=ValueOnTrunk(), **vars(parts))
    start = value_model_start(inputs.config)
    folder = start if isinstance(start, Path) else inputs.parents[start]
    value = separate_value_model(folder)
    # A reward model of another run scores token numbers: with another tokenizer it would train, and mean nothing.
    needed, shape = inputs.config.model, value.shape
    tokenizer = Tokenizer.load(inputs.parents[tokenizer_stage(inputs.config)])
    problem = tokenizer_difference(Tokenizer.load(folder), tokenizer)
    if shape.vocab_size < needed.vocab_size or shape.max_seq_len < needed.max_seq_len:
        problem = (
            f"it has a vocabulary of {shape.vocab_size} and a context of {shape.max_seq_len} tokens, the model in "
            f"training {needed.vocab_size} and {needed.max_seq_len}"
        )
    if problem:
        raise ConfigError(
            f"{PPO.name}.value_model: the reward model {folder} does not read the tokens of this run ({problem}); set "
            "policy or head, or train the reward model in this run"
        )
    return Ppo(config=config, value=value, **vars(parts))


def value_model_start(run: RunConfig) -> str | Path:
    """Returns the stage, or the folder, whose weights a value model starts from; among several reward models, the one
    of the run. Raises `ConfigError` if `ppo.rewards` names several folders and no model of the run.
    """
    if run.section(PPO.name).value_model == "policy":
        return model_before(run, PPO.name)
    terms = reward_terms(run, PPO.name)
    folders = sorted(set(reward_model_folders(terms).values()))
    # The run's own reward model, if a term uses it or if nothing else names a model.
    if without_folder(terms) or not folders:
        return reward_model_before(run, PPO.name) or REWARD.name
    if len(folders) > 1:
        raise ConfigError(
            f"{PPO.name}.value_model: {PPO.name}.rewards names several reward models ({', '.join(folders)}); keep one "
            "of them, or set policy or head"
        )
    return Path(folders[0])


def _further(run: RunConfig, config: PpoConfig) -> FurtherModels:
    terms = reward_terms(run, PPO.name)
    count = int(config.kl_coef > 0) + len(model_terms(terms))
    return FurtherModels(
        num_models=count,
        num_trained=int(config.value_model != "head"),
        num_forwards=(2 + count) / config.num_ppo_epochs,  # 2: generation of completions, and their values
        folders=reward_model_folders(terms),
    )


PPO = rollout_training(
    name="ppo",
    title="Reinforcement learning with a value function (PPO)",
    report_title="PPO",
    model_title="PPO",
    objective=_objective,
    config=PpoConfig,
    updates_per_row=lambda config: config.num_ppo_epochs,
    further=_further,
    charts={
        "KL from the start, nats per completion": {"objective/kl": "rollouts"},
        "Weight of the KL penalty": {"objective/kl_coef": "rollouts"},
        "Entropy, nats per token": {"policy/entropy_avg": "updates"},
        "Share of clipped tokens": {"policy/clipfrac_avg": "updates"},
        "Value loss": {"loss/value_avg": "updates"},
        "Mean length of completions, tokens": {"completions/mean_length": "rollouts"},
    },
    kl_metric="objective/kl",
    needs=lambda run: (
        (start,)
        if run.section(PPO.name).value_model == "reward" and not isinstance(start := value_model_start(run), Path)
        else ()
    ),
)
