"""The job on TRL's PPOTrainer, which TRL 1.12 had last: policy, reference, reward model and value model."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] - comes with trl
from transformers import LlamaForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

from tuners.task import Clock, Task, prompts
from tuners.trl_tuners import Ticker, load, settings, tokenizer


def run(task: Task, name: str, out: Path) -> dict[str, Any]:
    clock, words = Clock(task), tokenizer()
    words.padding_side = "left"
    data = Dataset.from_list([{"input_ids": ids} for ids in prompts(task)])
    judge, value_model = (
        LlamaForSequenceClassification.from_pretrained(
            task.folder / "reward", attn_implementation="sdpa", dtype=torch.float32
        )
        for _ in range(2)
    )
    trainer = PPOTrainer(
        args=PPOConfig(
            total_episodes=task.num_updates * task.batch,
            response_length=task.completion_len,
            num_ppo_epochs=task.num_epochs,
            num_mini_batches=1,
            local_rollout_forward_batch_size=task.batch,
            temperature=1.0,
            num_sample_generations=0,
            stop_token="eos",
            **settings(task, out),
        ),
        processing_class=words,
        model=load(task),
        ref_model=None,
        reward_model=judge,
        value_model=value_model,
        train_dataset=data,
        callbacks=[Ticker(clock)],
    )
    trainer.train()
    samples = [float(task.batch)] * task.num_updates
    tokens = [one * (task.prompt_len + task.completion_len) for one in samples]
    logged = next(one for one in trainer.state.log_history if "loss/policy_avg" in one)
    return {**clock.rates(samples, tokens), "first_loss": logged["loss/policy_avg"]}
