"""Distillation on the student's own completions, in a share of the batches, which learns the teacher's predictions for
them (Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv 2306.13649, algorithm 1).

The prompts come from a batch of rows: the text before the first answer of a conversation, or all but the end of a text.
The completions are sampled from the student's current distribution and replace the rest of the document. Gradients do
not pass through the sampling. Batch n is a function of n and of the weights, so that nothing has to be saved.

Legend: C completions, L tokens of the longest one with its prompt, T = L - 1 places (see `completion_rows.py`), B rows.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.completion_rows import RowPlan, completion_batch
from modelwright.objectives.distillation import SAMPLED, Distillation
from modelwright.objectives.next_token import num_targets
from modelwright.objectives.rollouts import RolloutConfig, gather_rows, share
from modelwright.ops.attention_divergence import documents
from modelwright.train.objective import Metric, ModelLayout, Objective, Terms, one_process

OWN_METRICS = ("on_policy/divergence", "completions/mean_length")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """Batches with the student's own completions (GKD, Agarwal et al. 2024)."""

    share: float = 0.0
    """Share of the batches, while the part `logits` is in force, in which the student completes the prompts of the
    rows and learns the teacher's predictions for its tokens; 0 learns from the rows alone."""
    max_completion_length: int = field(default=256, metadata=only_for("share"))
    """Maximum tokens of such a completion. It replaces the answer of a conversation, or the end of a text, at most its
    second half, and is never longer than the replaced tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share: must be in [0, 1], got {self.share}; 0 learns from the rows alone")
        if self.max_completion_length < 1:
            raise ConfigError(f"max_completion_length: must be at least 1, got {self.max_completion_length}")


@dataclass(frozen=True, kw_only=True)
class RowPrompt:
    """Start of a document of a row. max_tokens: limit of the completion; both together fit the document's place."""

    row: int
    ids: Sequence[int]
    max_tokens: int


def prompts_of_rows(batch: TokenBatch, max_completion_length: int) -> list[RowPrompt]:
    """Returns the prompts of the documents that have a label, in the order of the rows."""
    result: list[RowPrompt] = []
    for row, start, end in documents(batch.segments_BT):
        labeled = (batch.labels_BT[row, start:end] != IGNORED).nonzero().flatten()
        if not len(labeled):
            continue
        length, first = end - start, int(labeled[0])
        # A text is predicted from its first token on; nothing is predicted before the answer of a conversation.
        room = length // 2 if first == 0 else length - first - 1
        max_tokens = min(room, max_completion_length)
        num_prompt = length - max_tokens if first == 0 else first + 1
        ids: list[int] = batch.input_ids_BT[row, start : start + num_prompt].tolist()  # pyright: ignore
        result.append(RowPrompt(row=row, ids=ids, max_tokens=max_tokens))
    return result


@dataclass(kw_only=True)
class OnPolicyDistillation(Objective):
    """A distillation with some batches of the student's own completions, without the labels' share of the loss."""

    distillation: Distillation
    config: OnPolicyConfig
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    seed: int
    layout: ModelLayout = field(default_factory=one_process)
    needs: frozenset[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        self.needs = self.distillation.needs | {EQUAL_REPLICAS, SYNCHRONOUS_UPDATES}

    @property
    def metric_names(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*self.distillation.metric_names, *OWN_METRICS)

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return self.distillation.own_modules(config)

    def begin(self, layout: ModelLayout) -> None:
        self.layout = layout

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        source, num_steps = self.distillation.source, self.distillation.num_steps
        try:
            for step in itertools.count(first):
                if self.is_sampled(step):
                    every = self.completed_rows(source.batch(step), model, step)
                    rows = every.padded(-(-every.num_rows // world_size) * world_size).split(world_size)[rank]
                else:
                    rows = source.batch(step, rank=rank, world_size=world_size)
                yield self.distillation.with_teacher(rows, model, step / num_steps)
        finally:
            self.distillation.unwatch(model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.distillation.prepare(batch, model)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.distillation.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        terms = self.distillation.losses(output, batch, model)
        nothing: Metric = (output.new_zeros(()), output.new_zeros(()))
        of_rows, of_completions = terms.metrics, dict.fromkeys(OWN_METRICS, nothing)
        if SAMPLED in batch.extras:
            of_rows = dict.fromkeys(terms.metrics, nothing)
            own = (terms.metrics["divergence"], (num_targets(batch), batch.extras[SAMPLED].sum()))
            of_completions = dict(zip(OWN_METRICS, own, strict=True))
        return Terms(terms.losses, {**of_rows, **of_completions})

    def is_sampled(self, step: int) -> bool:
        """Returns whether the batch of this step, from 0, has the student's completions."""
        # A function of seed and step, so that all ranks and a resumed run agree without a message
        drawn = derive_seed(self.seed, "on policy", step) / 2**63
        return drawn < self.config.share and "logits" in self.distillation.in_force(step / self.distillation.num_steps)

    def completed_rows(self, batch: TokenBatch, model: Decoder, step: int) -> TokenBatch:
        """Returns equally many rows with the prompts of a global batch and the student's completions, which have the
        labels. All ranks call together with the same batch, generate a share each, and get the same rows.
        """
        prompts, world = prompts_of_rows(batch, self.config.max_completion_length), self.layout.world
        own = [(number, prompts[number]) for number in share(len(prompts), world)]
        params = [
            SamplingParams(
                max_tokens=prompt.max_tokens,
                temperature=1.0,
                # By the prompt's number in the global batch, so that completions do not depend on the number of ranks
                seed=derive_seed(self.seed, "completion", step, number),
                stop_ids=self.stop_ids,
            )
            for number, prompt in own
        ]
        limits = RolloutConfig(max_completion_length=self.config.max_completion_length)
        with self.layout.whole_model(model) as whole:
            engine = limits.engine(whole.config, [len(prompt.ids) for _, prompt in own])
            completions = generate(whole, [prompt.ids for _, prompt in own], params, engine)
        longest = max((len(prompt.ids) + prompt.max_tokens for prompt in prompts), default=2)
        ids_CL, lens_C = torch.zeros(len(own), longest, dtype=torch.int64), torch.zeros(len(own), dtype=torch.int64)
        for place, ((_, prompt), completion) in enumerate(zip(own, completions, strict=True)):
            ids = [*prompt.ids, *completion.token_ids]
            ids_CL[place, : len(ids)], lens_C[place] = torch.tensor(ids), len(ids)
        ids_CL, lens_C = gather_rows(world, ids_CL), gather_rows(world, lens_C)
        num_rows, row_len = batch.input_ids_BT.shape
        starts, used = list[int](), [0] * num_rows
        # Each completion stays in the row of its prompt; its last token predicts nothing
        lengths = (lens_C - 1).tolist()
        for prompt, length in zip(prompts, lengths, strict=True):
            starts.append(used[prompt.row])
            used[prompt.row] += length
        rows = [prompt.row for prompt in prompts]
        plan = RowPlan(rows=rows, starts=starts, lengths=lengths, num_rows=num_rows, row_len=row_len)
        places_T = torch.arange(ids_CL.shape[1] - 1)
        prompt_lens_C1 = torch.tensor([len(one.ids) for one in prompts], dtype=torch.int64)[:, None]
        mask_CT = (places_T >= prompt_lens_C1 - 1) & (places_T < lens_C[:, None] - 1)
        starts_CT = mask_CT & (places_T == prompt_lens_C1 - 1)
        return completion_batch(ids_CL, mask_CT, plan, {SAMPLED.removesuffix("_BT"): starts_CT.float()})
