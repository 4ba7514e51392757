"""Rollouts: completions that the model in training generates, with their rewards, the same under every layout; and the
held-out evaluation by reward.

Each rank generates the completions of some of the prompts with the whole model; then all ranks gather all of them.
Tokens are sampled from the model's own distribution (temperature 1, no truncation), because policy gradients are
expectations under it: the log-probabilities that the engine reports are those of the behavior policy.

Legend: C completions, L tokens of the longest prompt with its completion, T = L - 1 places (see `experience.py`), R
reward terms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.config import ConfigError, ModelwrightError, constant, derive_seed
from modelwright.data.rows.batch import TokenBatch, part_sizes
from modelwright.data.rows.examples import PromptRecord
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import World
from modelwright.reward.build import WeightedSum
from modelwright.reward.reward import Sample
from modelwright.train.objective import Metric, ModelLayout

CACHE_BLOCK = EngineConfig().block_size


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the generation of completions."""

    max_completion_length: int = 256
    """Maximum tokens of a completion."""
    max_num_seqs: int = constant(64)
    """Completions that a rank generates at once; it decides the size of the key/value cache, not the result."""
    mask_truncated: bool = False
    """Leave completions that reach the limit out of the loss (the overlong filtering of DAPO, Yu et al. 2025)."""
    heldout_decoding: Literal["greedy", "sampling"] = "greedy"
    """Decoding of held-out prompts: the likeliest token each time, or samples from the policy's distribution, which
    updates improve. The random numbers are the same at every evaluation."""
    shown_completions: int = constant(4)
    """Completions of a rollout that are kept for the report."""

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")

    def engine(self, model: ModelConfig, prompt_lens: Sequence[int]) -> EngineConfig:
        """Returns settings of an engine for these prompts, at most `max_num_seqs` of them at once."""
        count = max(1, min(self.max_num_seqs, len(prompt_lens)))
        longest = min(model.max_seq_len, max(prompt_lens, default=1) + self.max_completion_length)
        # At least a whole context of the model, which the engine requires of its cache
        blocks = max(count * -(-longest // CACHE_BLOCK), -(-model.max_seq_len // CACHE_BLOCK))
        return EngineConfig(max_num_seqs=count, kv_cache_tokens=blocks * CACHE_BLOCK)


def check_rollout_training(batching: BatchingConfig) -> None:
    """Raise `ConfigError` for settings of the order of rows, which prompts ignore."""
    if batching.curriculum.by != "none" or batching.mixture.is_on:
        raise ConfigError("batching: prompts are drawn in random order, without a curriculum or a mixture; remove it")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Completions with their rewards; the same on all ranks, on the CPU."""

    prompts_C: Tensor
    """int64, number of each completion's prompt."""
    ids_CL: Tensor
    """int64, prompt and completion; 0 after the end."""
    prompt_lens_C: Tensor
    """int64, tokens of the prompt."""
    lens_C: Tensor
    """int64, tokens of prompt and completion."""
    log_probs_CT: Tensor
    """float32, log-probability of each generated token under the model that generated it, in nats; 0 elsewhere."""
    stopped_C: Tensor
    """bool, true if the completion ended with a stop token, not at the limit of tokens."""
    rewards_C: Tensor
    """float64, weighted sum of the rewards; NaN where one failed or the model's output was not finite."""
    terms_CR: Tensor
    """float64, each reward without its weight; NaN for failures."""

    @property
    def num_completions(self) -> int:
        return len(self.lens_C)

    @property
    def completion_lens_C(self) -> Tensor:
        """int64, number of generated tokens, the stop token included."""
        return self.lens_C - self.prompt_lens_C

    @property
    def mask_CT(self) -> Tensor:
        """bool, true for places that predict a generated token."""
        places_T = torch.arange(self.log_probs_CT.shape[1])
        return (places_T >= self.prompt_lens_C[:, None] - 1) & (places_T < self.lens_C[:, None] - 1)

    @property
    def scored_C(self) -> Tensor:
        """bool, true if a completion has a reward; others are never trained on."""
        return self.rewards_C.isfinite()

    def take(self, numbers: Tensor) -> "Rollout":
        """Returns the completions with these numbers [N] int64, or those where a mask [C] is true."""
        return Rollout(**{name: values[numbers] for name, values in self.state_dict().items()})

    def state_dict(self) -> dict[str, Tensor]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def joined(cls, rollouts: Sequence["Rollout"]) -> "Rollout":
        """Concatenates the completions of several rollouts, in order."""
        longest = max(one.ids_CL.shape[1] for one in rollouts)
        joined: dict[str, Tensor] = {}
        for name in (one.name for one in fields(cls)):
            values: list[Tensor] = [getattr(one, name) for one in rollouts]
            if name.endswith(("_CL", "_CT")):
                width = longest - name.endswith("_CT")
                values = [F.pad(one, (0, width - one.shape[1])) for one in values]
            joined[name] = torch.cat(values)
        return cls(**joined)


@dataclass(frozen=True, kw_only=True)
class RolloutWorker:
    """Generates and scores completions of prompts."""

    prompts: Sequence[PromptRecord]
    tokenizer: Tokenizer
    reward: WeightedSum
    config: RolloutConfig
    seed: int
    on_step: Callable[[int], None] = lambda num_finished: None
    """Called after each step of the engine with the number of completions that this rank has finished."""

    @property
    def term_names(self) -> list[str]:
        """Names of the reward terms, in the order of `Rollout.terms_CR`."""
        return [term.reward.name for term in self.reward.terms]

    def roll_out(
        self,
        whole: Decoder,
        world: World,
        numbers: Sequence[int],
        *,
        num_generations: int,
        stream: Sequence[str | int],
        greedy: bool = False,
    ) -> Rollout:
        """Generate `num_generations` completions of each of the prompts with these numbers, one prompt after the other.
        All ranks of `world` call together; the completions do not depend on the number of ranks.

        whole: the whole model (`ModelLayout.whole_model`)
        stream: name of the random stream, so that each rollout samples different tokens.

        Raises `ModelwrightError` on all ranks if a reward that counts has a score for no answer at all.
        """
        own = [(place, generation) for place in share(len(numbers), world) for generation in range(num_generations)]
        params = [
            SamplingParams(
                max_tokens=self.config.max_completion_length,
                temperature=0.0 if greedy else 1.0,
                # By the place in the global list, so that completions do not depend on the number of ranks
                seed=derive_seed(self.seed, *stream, place, generation),
                stop_ids=self.tokenizer.stop_ids,
            )
            for place, generation in own
        ]
        records = [self.prompts[numbers[place]] for place, _ in own]
        ids = [one.ids for one in records]
        engine = self.config.engine(whole.config, [len(one) for one in ids])
        completions = generate(whole, ids, params, engine, on_step=self.on_step)
        samples = [
            Sample(
                prompt=prompt.messages,
                answer=self.text_of(completion.token_ids),
                num_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                fields=prompt.fields,
            )
            for prompt, completion in zip(records, completions, strict=True)
        ]
        scored = self.reward.evaluate(samples)
        prompt_lens = [len(one) for one in ids]
        # This rank's completions as tensors, as wide as the longest one of all ranks; one place at least, also on ranks
        # without completions
        lens = [length + len(one.token_ids) for length, one in zip(prompt_lens, completions, strict=True)]
        longest = int(world.maxima(max(lens, default=2))[0])
        ids_CL = torch.zeros(len(lens), longest, dtype=torch.int64)
        log_probs_CT = torch.zeros(len(lens), longest - 1)
        for row, (record, completion) in enumerate(zip(records, completions, strict=True)):
            begin, end = prompt_lens[row], lens[row]
            ids_CL[row, :end] = torch.tensor([*record.ids, *completion.token_ids])
            log_probs_CT[row, begin - 1 : end - 1] = torch.tensor(completion.logprobs)
        rewards_C = torch.tensor([score.value for score in scored.scores], dtype=torch.float64)
        # Made bool below, because a tensor of an empty list is not
        broken_C = torch.tensor([not one.token_ids or one.finish_reason == "error" for one in completions])
        terms = [[score.value for score in scores] for scores in scored.terms.values()]
        part = Rollout(
            prompts_C=torch.tensor([numbers[place] for place, _ in own], dtype=torch.int64),
            ids_CL=ids_CL,
            prompt_lens_C=torch.tensor(prompt_lens, dtype=torch.int64),
            lens_C=torch.tensor(lens, dtype=torch.int64),
            log_probs_CT=log_probs_CT,
            stopped_C=torch.tensor([one.finish_reason == "stop" for one in completions], dtype=torch.bool),
            rewards_C=rewards_C.where(~broken_C.bool(), torch.nan),
            terms_CR=torch.tensor(terms, dtype=torch.float64).view(len(self.reward.terms), len(lens)).T.contiguous(),
        )
        rollout = Rollout(**{name: gather_rows(world, values) for name, values in part.state_dict().items()})
        for number, term in enumerate(self.reward.terms):
            if term.weight and rollout.num_completions and not rollout.terms_CR[:, number].isfinite().any():
                raise ModelwrightError(
                    f"reward {term.reward.name}: none of {rollout.num_completions} answers has a score, so nothing "
                    "would be learned; the log has the reason for the first ones"
                )
        return rollout

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decodes a completion."""
        # A model may have more rows of the embedding than the tokenizer has tokens
        return self.tokenizer.decode([one for one in token_ids if one < self.tokenizer.vocab_size])


def share(count: int, world: World) -> range:
    """Returns this rank's consecutive part of `count` items, which may be empty if there are fewer items than ranks."""
    # `part_sizes` gives every rank an item; with fewer items the last ranks have none
    sizes = [*part_sizes(count, world.size)] if count >= world.size else [1] * count + [0] * (world.size - count)
    first = sum(sizes[: world.rank])
    return range(first, first + sizes[world.rank])


def gather_rows(world: World, rows: Tensor) -> Tensor:
    """Gathers rows of one shape and format from all ranks, any number of each, in their order, on the CPU."""
    # As bytes, because ranks may have different numbers of rows
    parts = world.gather_bytes(rows.contiguous().cpu().flatten().view(torch.uint8))
    return torch.cat([part.cpu() for part in parts]).view(rows.dtype).view(-1, *rows.shape[1:])


def rollout_metrics(rollout: Rollout, term_names: Sequence[str]) -> dict[str, float]:
    """Figures of a rollout under TRL's names, without those of empty sets."""
    lengths_C = rollout.completion_lens_C.double()
    result: dict[str, float] = {
        "reward/failures": float((~rollout.scored_C).sum()),
        "completions/clipped_ratio": float((~rollout.stopped_C).double().mean()),
        "completions/mean_length": float(lengths_C.mean()),
        "completions/min_length": float(lengths_C.min()),
        "completions/max_length": float(lengths_C.max()),
    }
    if rollout.scored_C.any():
        result["reward"] = float(rollout.rewards_C[rollout.scored_C].mean())
    for name, values_C in zip(term_names, rollout.terms_CR.T, strict=True):
        kept = values_C[values_C.isfinite()]
        result[f"rewards/{name}/failures"] = float(len(values_C) - len(kept))
        if len(kept):
            result[f"rewards/{name}/mean"] = float(kept.mean())
            result[f"rewards/{name}/std"] = float(kept.std()) if len(kept) > 1 else 0.0
    return result


def shown(rollout: Rollout, worker: RolloutWorker, count: int) -> list[dict[str, Any]]:
    """Returns the first completions of different prompts, with their rewards, as plain data."""
    seen: dict[int, dict[str, Any]] = {}
    for row, number in enumerate(rollout.prompts_C.tolist()):
        if number in seen or len(seen) == count:
            continue
        begin, end = int(rollout.prompt_lens_C[row]), int(rollout.lens_C[row])
        seen[number] = {
            "prompt": worker.prompts[number].messages[-1]["content"],
            "completion": worker.text_of(rollout.ids_CL[row, begin:end].tolist()),
            "reward": float(rollout.rewards_C[row]),
        }
    return list(seen.values())


def constant_metrics(values: Mapping[str, float], names: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Converts figures that all ranks know to metrics of one microbatch."""
    # The mean over any number of microbatches and ranks is the figure; names without a value count nothing
    one, none = torch.ones((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.float64, device=device)
    return {name: (one * values[name], one) if name in values else (none, none) for name in names}


NUMBERS, FIGURES = "prompt_numbers_BN", "figures_BM"


def heldout_batch(row: TokenBatch, numbers: Sequence[int]) -> TokenBatch:
    """Builds the held-out set of these prompts. row: any row of tokens, for the forward pass of the evaluation."""
    return replace(row, extras={NUMBERS: torch.tensor([list(numbers)], dtype=torch.int64)})


def is_heldout(batch: TokenBatch) -> bool:
    """Returns whether a batch comes from an evaluation."""
    return FIGURES in batch.extras


@dataclass(frozen=True, kw_only=True)
class HeldoutRewards:
    """Scores the model on held-out prompts, and against its own first evaluation."""

    worker: RolloutWorker
    first_terms: list[Tensor] = field(default_factory=list[Tensor])
    """Rewards of the first evaluation by prompt and term [N, R], empty before it."""

    @property
    def metric_names(self) -> list[str]:
        """Names of all figures that `rollout_metrics` may return, and of the win rates."""
        names = self.worker.term_names
        lengths = [f"completions/{name}" for name in ("clipped_ratio", "mean_length", "min_length", "max_length")]
        terms = [f"rewards/{name}/{figure}" for name in names for figure in ("mean", "std", "failures")]
        return ["reward", "reward/failures", *lengths, *terms, *map(win_rate_name, names)]

    def state_dict(self) -> dict[str, Any]:
        return {"first_terms": [*self.first_terms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_terms[:] = state["first_terms"]

    def prepare(self, batch: TokenBatch, model: Decoder, layout: ModelLayout) -> TokenBatch:
        """Adds the figures of this evaluation [1, M], NaN for missing ones, to a batch. All ranks call together."""
        numbers = batch.extras[NUMBERS][0].tolist()
        with layout.whole_model(model) as whole:
            greedy = self.worker.config.heldout_decoding == "greedy"
            rollout = self.worker.roll_out(
                whole, layout.world, numbers, num_generations=1, stream=("heldout",), greedy=greedy
            )
        # The first evaluation is the opponent of all later ones, also after a resumption
        if not self.first_terms:
            self.first_terms.append(rollout.terms_CR)
        names = self.worker.term_names
        rates_R = win_rates(rollout.terms_CR, self.first_terms[0])
        found = rollout_metrics(rollout, names) | dict(zip(map(win_rate_name, names), rates_R, strict=True))
        figures = [found.get(name, math.nan) for name in self.metric_names]
        device = batch.input_ids_BT.device
        return replace(batch, extras={FIGURES: torch.tensor([figures], dtype=torch.float64, device=device)})

    def weight(self, batch: TokenBatch) -> Tensor:
        """Returns 1, or 0 if no completion could be scored."""
        return self._reward(batch).isfinite().sum()

    def loss(self, batch: TokenBatch) -> Tensor:
        """Returns minus the mean reward, so that the best weights have the lowest held-out loss."""
        return -self._reward(batch).nan_to_num(0.0)

    def metrics(self, batch: TokenBatch) -> Mapping[str, Metric]:
        """Returns the figures under `metric_names`."""
        figures = dict(zip(self.metric_names, batch.extras[FIGURES][0].tolist(), strict=True))
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        return constant_metrics(finite, self.metric_names, batch.input_ids_BT.device)

    def _reward(self, batch: TokenBatch) -> Tensor:
        return batch.extras[FIGURES][0, self.metric_names.index("reward")]


def win_rate_name(term: str) -> str:
    return f"rewards/{term}/win_rate"


def win_rates(terms_NR: Tensor, first_NR: Tensor) -> list[float]:
    """Share of prompts, for each term, with a higher reward than at first; ties count half."""
    # Prompts with a completion that could not be scored are left out; NaN if none remains
    known_NR = terms_NR.isfinite() & first_NR.isfinite()
    wins_NR = (terms_NR > first_NR).double() + 0.5 * (terms_NR == first_NR).double()
    return ((wins_NR * known_NR).sum(dim=0) / known_NR.sum(dim=0)).tolist()
