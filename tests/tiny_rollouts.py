"""What tests of rollouts share: a tokenizer, a model of its vocabulary, prompts, and a reward."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_run
import torch
from torch import Tensor

from modelwright.core.config import parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.examples import PromptRecord
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.objectives.experience import ReferenceModel
from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.objectives.ppo import Ppo, PpoConfig, SeparateValueModel, ValueOnTrunk
from modelwright.objectives.preference import HEAD
from modelwright.objectives.rollouts import HeldoutRewards, Rollout, RolloutConfig, RolloutWorker, heldout_batch
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.reward.build import Term, WeightedSum
from modelwright.reward.reward import Sample, Score
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import Objective
from modelwright.train.technique import Technique, Update

MAX_NEW, ROW_LEN = 24, 48
ALONE = single()
SHAPE = replace(tiny_run.SHAPE, vocab_size=264, init_std=0.2, max_seq_len=64)

VALUE_SHAPE = replace(SHAPE, num_layers=3, ffn_dim=48, init_std=0.1)


@functools.cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["abc def"] * 4, TokenizerConfig(vocab_size=263))


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    made = Decoder(SHAPE)
    made.init_weights(seed)
    return made.to(dtype)


def reward_model() -> Decoder:
    """A reward model of another shape than the policy."""
    made = Decoder(VALUE_SHAPE)
    made.init_weights(4)
    made.heads[HEAD] = torch.nn.Linear(VALUE_SHAPE.model_dim, 1, bias=False)
    torch.nn.init.normal_(made.heads[HEAD].weight, std=0.5, generator=torch.Generator().manual_seed(4))
    return made


def prompts(count: int) -> list[PromptRecord]:
    """Prompts of different lengths."""
    questions = [{"role": "user", "content": "a" * (1 + number % 5)} for number in range(count)]
    return [PromptRecord(ids=tokenizer().chat.encode_prompt([one]), messages=[one]) for one in questions]


@dataclass(frozen=True)
class EvenTokens:
    """The share of characters whose code is even. It fails where the sum of the codes is a multiple of `fault`."""

    name: str = "even"
    fault: int = 0

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if self.fault and sum(map(ord, sample.answer)) % self.fault == 0:
            return Score.failure("fault")
        return Score(sum(ord(one) % 2 == 0 for one in sample.answer) / max(1, len(sample.answer)))


def worker(count: int = 4, *, fault: int = 0, **options: Any) -> RolloutWorker:
    return RolloutWorker(
        prompts=prompts(count),
        tokenizer=tokenizer(),
        reward=WeightedSum([Term(EvenTokens(fault=fault), 1.0)]),
        config=RolloutConfig(max_completion_length=MAX_NEW),
        seed=3,
        **options,
    )


def parts(rollout: RolloutConfig, *, fault: int, world: World, dtype: torch.dtype) -> dict[str, Any]:
    """What objectives that roll out are made of."""
    made = replace(worker(6, fault=fault), config=rollout)
    return {
        "worker": made,
        "heldout": HeldoutRewards(worker=replace(made, prompts=prompts(3))),
        "reference": ReferenceModel(
            load=lambda: FrozenModel(model(dtype, seed=1), world, sharded=world.size > 1), row_len=ROW_LEN
        ),
        "row_len": ROW_LEN,
    }


def grpo(
    world: World = ALONE,
    *,
    num_completions: int = 8,
    fault: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Grpo:
    """An objective whose updates learn from `num_completions` completions."""
    config = parse(
        GrpoConfig, {"num_generations": 4, "rollout": {"max_completion_length": MAX_NEW}, **settings}, constants=True
    )
    return Grpo(
        config=config, num_completions=num_completions, **parts(config.rollout, fault=fault, world=world, dtype=dtype)
    )


def ppo(
    world: World = ALONE,
    *,
    num_completions: int = 8,
    fault: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Ppo:
    config = parse(PpoConfig, {"rollout": {"max_completion_length": MAX_NEW}, **settings}, constants=True)
    separate = SeparateValueModel(shape=VALUE_SHAPE, load=reward_model)
    return Ppo(
        config=config,
        value=ValueOnTrunk() if config.value_model == "head" else separate,
        num_completions=num_completions,
        **parts(config.rollout, fault=fault, world=world, dtype=dtype),
    )


def train(
    world: World,
    folder: Path,
    objective: Objective,
    *,
    stop: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Tensor]:
    """Four updates; final weights, and the metrics of each update as `step N, name`."""
    torch.set_num_threads(1)
    trained, metrics = model(dtype), dict[int, dict[str, float]]()
    parallel = ParallelConfig(**options.pop("parallel", {}))

    def keep(update: Update) -> None:
        metrics[update.step] = dict(update.metrics)

    settings = {"num_steps": 4, "checkpoint_every_steps": 1, "eval_every_steps": 2, "weight_decay": 0.0, **options}
    tiny_run.run(
        folder,
        tiny_run.settings(**settings),
        model=trained,
        objective=objective,
        world=world,
        parallel=parallel,
        heldout=heldout_rows(),
        techniques=[
            tiny_run.always(Technique(name="keep", on_gradients=keep, needs=frozenset())),
            *tiny_run.watching(stop=tiny_run.StopAfter(stop)),
        ],
    )
    found = {name: weight.clone() for name, weight in trained.state_dict().items()}
    for step, values in metrics.items():
        found |= {f"step {step}, {name}": torch.tensor(value) for name, value in values.items() if "flops" not in name}
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    """Old log-probabilities are FP32, so that rounding differs in the last bits of those."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{case}, {key}: {text}"
        )


def completion_log_probs(model: Decoder, rollout: Rollout, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """What all logits of a completion's sequence alone give: log p of its tokens, entropies, hidden states before."""
    begin, end = int(rollout.prompt_lens_C[row]), int(rollout.lens_C[row])
    ids_1T = rollout.ids_CL[row : row + 1, :end]
    hidden_1TD = model(ids_1T, torch.arange(end)[None], causal_attend())
    log_probs_TV = model.logits(hidden_1TD)[0, begin - 1 : end - 1].log_softmax(-1)
    chosen_T = log_probs_TV.gather(1, ids_1T[0, begin:, None])[:, 0]
    return chosen_T, -(log_probs_TV.exp() * log_probs_TV).sum(-1), hidden_1TD[0, begin - 1 : end - 1]


def changed(model: Decoder) -> Decoder:
    """The model with other weights, so that ratios are not 1 and some are clipped."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def heldout_rows(count: int = 3) -> list[TokenBatch]:
    return [heldout_batch(tiny_run.Rows(num_rows=1).batch(0), range(count))]
