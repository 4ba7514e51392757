"""Distillation: a student learns a teacher's hidden states, attention and logits, each in its own part of the training,
from rows, and in a share of the batches from its own completions.

Sources: hidden states through learned projections (Jiao et al. 2020, TinyBERT), attention (`teacher.py`), logits with a
temperature together with hard labels (Hinton et al. 2015); completions of the student, on which it learns the teacher's
predictions (Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv 2306.13649, algorithm 1).

Legend: B rows, T tokens or places (see `experience.py`), D width of the student, E width of the teacher, C completions,
L tokens of the longest one with its prompt.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from modelwright.core import compatibility
from modelwright.core.config import ConfigError, derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import LayerTaps
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives import teacher as teachers
from modelwright.objectives.experience import RowPlan, completion_batch
from modelwright.objectives.next_token import num_targets, numbered_batches
from modelwright.objectives.rollouts import RolloutConfig, gather_rows, share
from modelwright.ops.attention_divergence import documents
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.distillation_loss import FORWARD, DivergenceKind, Teacher, TeacherHead, TopTokens
from modelwright.train.objective import BatchSource, Metric, ModelLayout, Objective, Terms, one_process


def even_layer_map(num_layers: int, num_teacher_layers: int) -> tuple[int, ...]:
    """Teacher's layer for each of the student's: evenly spaced, ending with the last one (TinyBERT)."""
    step = num_teacher_layers / num_layers
    return tuple(max(0, round((layer + 1) * step) - 1) for layer in range(num_layers))


def layer_pairs(layer_map: Sequence[int], num_layers: int, num_teacher_layers: int) -> list[tuple[int, int]]:
    """Pairs of layers that `DistillationSettings.layer_map` compares. Raises `ConfigError` for an impossible map."""
    layers = layer_map or even_layer_map(num_layers, num_teacher_layers)
    if len(layers) != num_layers or not all(-1 <= layer < num_teacher_layers for layer in layers):
        raise ConfigError(
            f"layer_map: needs a layer of the teacher (0 to {num_teacher_layers - 1}, or -1 for none) for each of the "
            f"student's {num_layers} layers, got {list(layers)}"
        )
    if max(layers) < 0:
        raise ConfigError("layer_map: maps no layer; give one of them a layer of the teacher")
    return [(own, layer) for own, layer in enumerate(layers) if layer >= 0]


PartName = Literal["hidden", "attention", "logits"]
PARTS: tuple[PartName, ...] = ("hidden", "attention", "logits")
SAMPLED = "sampled_starts_BT"
"""Extra of batches with labels sampled from the student, never learned: 1 where a completion starts, else 0."""
PROJECTION, FACTOR, OUTPUT = "distillation_{}", "{}_factor_B", "output_{}_BTE"
"""Names of the head for a student's layer, and of the extras with a part's factor and a teacher's output."""
PART_NEEDS: Mapping[PartName, frozenset[str]] = {
    "hidden": frozenset({compatibility.LAYER_OUTPUTS, compatibility.EAGER_BLOCKS}),
    "attention": frozenset({compatibility.WHOLE_LAYERS, compatibility.WHOLE_ROWS, compatibility.EAGER_BLOCKS}),
    "logits": frozenset(),
}
"""Requirements of each part on a run."""


@dataclass(frozen=True)
class LossPart:
    """A part of the loss: its weight from the share `start` of the training to the share `end`, and 0 otherwise."""

    weight: float
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if self.weight < 0 or not 0.0 <= self.start <= self.end <= 1.0:
            raise ConfigError(
                f"must be a weight that is not negative and two shares of the training in order, such as [1, 0, 0.25]; "
                f"got [{self.weight:g}, {self.start:g}, {self.end:g}]"
            )

    def at(self, progress: float) -> float:
        """Weight at a share of the training in [0, 1]."""
        # Parts that end at 1 include the end itself, at which held-out rows are evaluated
        is_on = self.start <= progress < self.end or progress == self.end == 1.0
        return self.weight if is_on else 0.0


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Settings of a distillation."""

    parts: Mapping[PartName, LossPart]
    temperature: float = 1.0
    label_share: float = 0.2
    """Share of the hard labels in the part `logits`."""
    divergence: DivergenceKind = FORWARD
    """Divergence from the teacher's distribution, in the part `logits`."""
    layer_map: tuple[int, ...] = ()
    """Layer of the teacher for each layer of the student, -1 for none; empty maps the layers evenly."""
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def used(self) -> list[PartName]:
        """Parts that have a weight at some time."""
        return [name for name in PARTS if name in self.parts and self.parts[name].weight > 0]

    @property
    def reads_layers(self) -> bool:
        """True if some part compares activations of layers."""
        return bool({"hidden", "attention"} & set(self.used))


def check_shapes(settings: DistillationSettings, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise `ConfigError` for a layer map that is impossible between models of these shapes."""
    if "hidden" in settings.used:
        layer_pairs(settings.layer_map, student.num_layers, teacher.num_layers)


@dataclass(kw_only=True)
class Distillation(Objective):
    """Three terms, `hidden`, `attention` and `logits`, whose factors follow the step. Held-out rows are evaluated with
    the factors at the end of training, so that evaluations are comparable.

    num_steps: updates of the whole training. cache: stored probabilities of the teacher in place of its logits.
    """

    metric_names = ("divergence", "label_loss")

    source: BatchSource
    teacher: teachers.TeacherModel
    settings: DistillationSettings
    num_steps: int
    cache: teachers.TeacherCache | None = None
    needs: frozenset[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    watched: list[tuple[Decoder, LayerTaps]] = field(default_factory=list[tuple[Decoder, LayerTaps]], init=False)
    """Models whose layers are read, with their hooks."""

    def __post_init__(self) -> None:
        self.needs = frozenset[str]().union(*(PART_NEEDS[name] for name in self.settings.used))

    def layer_pairs(self, student: ModelConfig) -> list[tuple[int, int]]:
        """Layers of student and teacher whose outputs are compared. Raises `ConfigError` for an impossible map."""
        if "hidden" not in self.settings.used:
            return []
        return layer_pairs(self.settings.layer_map, student.num_layers, self.teacher.config.num_layers)

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        """Returns a projection from the student's width to the teacher's for each pair of layers."""
        width = self.teacher.config.model_dim
        pairs = self.layer_pairs(config)
        modules = {PROJECTION.format(own): nn.Linear(config.model_dim, width, bias=False) for own, _ in pairs}
        # The identity at first where the widths are equal
        for module in modules.values() if config.model_dim == width else ():
            nn.init.eye_(module.weight)
        return modules

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        batches = numbered_batches(self.source, first=first, rank=rank, world_size=world_size)
        try:
            for step, batch in enumerate(batches, start=first):
                yield self.with_teacher(batch, model, step / self.num_steps)
        finally:
            self.unwatch(model)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.with_teacher(batch, model, 1.0)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        num_tokens = (batch.segments_BT >= 0).sum()
        counts = {"hidden": num_tokens, "attention": num_tokens, "logits": num_targets(batch)}
        return {name: counts[name] * (FACTOR.format(name) in batch.extras) for name in self.settings.used}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        outputs, heads = self._watch(model).take() if self.settings.reads_layers else ([], [])
        # FSDP gathers a layer's weights for backward when the gradient of its output arrives: each must get one, though
        # it be zero, also where what is learned branches off inside of the layer.
        nothing = 0.0 * output.sum(dtype=torch.promote_types(output.dtype, torch.float32))
        losses: dict[str, Tensor] = dict.fromkeys(self.settings.used, nothing)
        metrics: dict[str, Metric] = dict.fromkeys(self.metric_names, (nothing.detach(), nothing.detach()))
        # Rows of padding have a factor of zero, and all others that of the step
        extras = batch.extras
        factors = {name: extras[key].max() for name in self.settings.used if (key := FACTOR.format(name)) in extras}
        if "hidden" in factors:
            pairs, real_BT, gaps = self.layer_pairs(model.config), batch.segments_BT >= 0, list[Tensor]()
            for (own, _), hidden_BTD in zip(pairs, outputs, strict=True):
                wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
                gap_BTE = model.head_output(PROJECTION.format(own), wide_BTD) - extras[OUTPUT.format(own)]
                gaps.append((gap_BTE.square().mean(dim=-1) * real_BT).sum())
            losses["hidden"] = nothing + torch.stack(gaps).sum() / len(gaps) * factors["hidden"]
        if "attention" in factors:
            attention_loss = teachers.AttentionRelations(model.config, self.teacher.config).loss(heads[0], batch)
            losses["attention"] = nothing + attention_loss * factors["attention"]
        if "logits" in factors:
            if self.cache is None:
                targets: Teacher = TeacherHead(
                    hidden_NE=extras["teacher_hidden_BTE"].flatten(0, 1),
                    weight_VE=self.teacher.head_VE,
                    soft_cap=self.teacher.config.logit_soft_cap,
                    kind=self.settings.divergence,
                )
            else:
                log_probs_NK, tokens_NK = (
                    extras[teachers.LOG_PROBS].flatten(0, 1),
                    extras[teachers.TOKENS].flatten(0, 1),
                )
                targets = TopTokens(log_probs_NK=log_probs_NK, tokens_NK=tokens_NK)
            loss, divergence, label_loss = model.distillation_loss(
                output,
                batch.labels_BT,
                targets,
                temperature=self.settings.temperature,
                label_share=0.0 if SAMPLED in extras else self.settings.label_share,
                chunk_tokens=self.settings.chunk_tokens,
            )
            losses["logits"] = loss * factors["logits"]
            metrics = {"divergence": (divergence, num_targets(batch)), "label_loss": (label_loss, num_targets(batch))}
        return Terms(losses, metrics)

    def in_force(self, progress: float) -> dict[PartName, float]:
        """Returns the parts that are learned at this share of the training in [0, 1], with their weights."""
        factors: dict[PartName, float] = {name: self.settings.parts[name].at(progress) for name in self.settings.used}
        return {name: factor for name, factor in factors.items() if factor > 0}

    def with_teacher(self, batch: TokenBatch, model: Decoder, progress: float) -> TokenBatch:
        """Adds the factors and the teacher's tensors for the parts in force at this share of the training."""
        active, student, device = self.in_force(progress), model.config, batch.input_ids_BT.device
        extras: dict[str, Tensor] = {
            FACTOR.format(name): torch.full((batch.num_rows,), factor, dtype=torch.float64, device=device)
            for name, factor in active.items()
        }
        if self.settings.reads_layers:
            self._watch(model)
        if "logits" in active and self.cache is not None:
            extras |= self.cache.extras(batch)
        reads_hidden = "logits" in active and self.cache is None
        if "hidden" in active or "attention" in active or reads_hidden:
            # One forward pass of the teacher for all parts
            pairs = self.layer_pairs(student) if "hidden" in active else []
            layers = list(dict.fromkeys(layer for _, layer in pairs))
            heads = [self.teacher.config.num_layers - 1] if "attention" in active else []
            found = self.teacher.output(batch, outputs=layers, heads=heads)
            read = {OUTPUT.format(own): found.outputs[layers.index(layer)] for own, layer in pairs}
            for last in found.heads:
                read |= teachers.AttentionRelations(student, self.teacher.config).extras(last)
            if reads_hidden:
                read["teacher_hidden_BTE"] = found.hidden_BTE
            extras |= {name: values.to(device) for name, values in read.items()}
        return replace(batch, extras={**batch.extras, **extras})

    def _watch(self, model: Decoder) -> LayerTaps:
        """Returns the hooks on this model's layers, which are set once."""
        for watched, taps in self.watched:
            if watched is model:
                return taps
        heads = [model.config.num_layers - 1] if "attention" in self.settings.used else []
        taps = LayerTaps(model, outputs=[own for own, _ in self.layer_pairs(model.config)], heads=heads)
        self.watched.append((model, taps))
        return taps

    def unwatch(self, model: Decoder) -> None:
        """Remove the hooks from this model."""
        for watched, taps in self.watched:
            if watched is model:
                taps.remove()
        self.watched = [pair for pair in self.watched if pair[0] is not model]


OWN_METRICS = ("on_policy/divergence", "completions/mean_length")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """Batches with the student's own completions (GKD, Agarwal et al. 2024)."""

    share: float = 0.0
    """Share of the batches, while the part `logits` is in force, in which the student completes the prompts of the
    rows and learns the teacher's predictions for its tokens; 0 learns from the rows alone."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share: must be in [0, 1], got {self.share}; 0 learns from the rows alone")


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
    rollout: RolloutConfig
    """`max_completion_length` limits a completion. It replaces the answer of a conversation, or the end of a text, at
    most its second half, and is never longer than the replaced tokens."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    seed: int
    layout: ModelLayout = field(default_factory=one_process)
    needs: frozenset[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        self.needs = self.distillation.needs | {compatibility.EQUAL_REPLICAS, compatibility.SYNCHRONOUS_UPDATES}

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
        prompts, world = prompts_of_rows(batch, self.rollout.max_completion_length), self.layout.world
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
        with self.layout.whole_model(model) as whole:
            engine = self.rollout.engine(whole.config, [len(prompt.ids) for _, prompt in own])
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
