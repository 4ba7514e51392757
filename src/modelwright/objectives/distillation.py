"""Distillation: a student learns a teacher's hidden states, attention and logits, each in its own part of the training.

Sources: hidden states through learned projections (Jiao et al. 2020, TinyBERT), attention (`attention_targets.py`),
logits with a temperature together with hard labels (Hinton et al. 2015). Rows that the student generates come from
`on_policy_distillation.py`.

Legend: B rows, T tokens, D width of the student, E width of the teacher.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import EAGER_BLOCKS, LAYER_OUTPUTS, WHOLE_LAYERS, WHOLE_ROWS
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import LayerTaps
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.attention_targets import AttentionForm, AttentionTargets, attention_targets
from modelwright.objectives.next_token import num_targets, numbered_batches
from modelwright.objectives.teacher import TeacherModel
from modelwright.objectives.teacher_cache import LOG_PROBS, TOKENS, TeacherCache
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.distillation_loss import FORWARD, DivergenceKind, Teacher, TopTokens
from modelwright.train.objective import BatchSource, Metric, Objective, Terms


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
    "hidden": frozenset({LAYER_OUTPUTS, EAGER_BLOCKS}),
    "attention": frozenset({WHOLE_LAYERS, WHOLE_ROWS, EAGER_BLOCKS}),
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
    attention_form: AttentionForm = "relations"
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
    """Raise `ConfigError` for a layer map or a form of attention that is impossible between models of these shapes."""
    if settings.reads_layers:
        pairs = layer_pairs(settings.layer_map, student.num_layers, teacher.num_layers)
        if "attention" in settings.used:
            attention_targets(settings.attention_form, student, teacher, pairs)


@dataclass(kw_only=True)
class Distillation(Objective):
    """Three terms, `hidden`, `attention` and `logits`, whose factors follow the step. Held-out rows are evaluated with
    the factors at the end of training, so that evaluations are comparable.

    num_steps: updates of the whole training. cache: stored probabilities of the teacher in place of its logits.
    """

    metric_names = ("divergence", "label_loss")

    source: BatchSource
    teacher: TeacherModel
    settings: DistillationSettings
    num_steps: int
    cache: TeacherCache | None = None
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

    def attention_targets(self, student: ModelConfig) -> AttentionTargets:
        """Returns the comparison of attention. Raises `ConfigError` for models that it cannot compare."""
        pairs = layer_pairs(self.settings.layer_map, student.num_layers, self.teacher.config.num_layers)
        return attention_targets(self.settings.attention_form, student, self.teacher.config, pairs)

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
            attention_loss = self.attention_targets(model.config).loss(heads, batch)
            losses["attention"] = nothing + attention_loss * factors["attention"]
        if "logits" in factors:
            if self.cache is None:
                targets: Teacher = self.teacher.targets(extras["teacher_hidden_BTE"], self.settings.divergence)
            else:
                log_probs_NK, tokens_NK = extras[LOG_PROBS].flatten(0, 1), extras[TOKENS].flatten(0, 1)
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
            targets = self.attention_targets(student) if "attention" in active else None
            heads = list(dict.fromkeys(layer for _, layer in targets.pairs)) if targets else []
            found = self.teacher.output(batch, outputs=layers, heads=heads)
            read = {OUTPUT.format(own): found.outputs[layers.index(layer)] for own, layer in pairs}
            if targets:
                read |= targets.extras(dict(zip(heads, found.heads, strict=True)))
            if reads_hidden:
                read["teacher_hidden_BTE"] = found.hidden_BTE
            extras |= {name: values.to(device) for name, values in read.items()}
        return replace(batch, extras={**batch.extras, **extras})

    def _watch(self, model: Decoder) -> LayerTaps:
        """Returns the hooks on this model's layers, which are set once."""
        for watched, taps in self.watched:
            if watched is model:
                return taps
        heads = self.attention_targets(model.config).pairs if "attention" in self.settings.used else []
        outputs = self.layer_pairs(model.config)
        taps = LayerTaps(model, outputs=[own for own, _ in outputs], heads=[own for own, _ in heads])
        self.watched.append((model, taps))
        return taps

    def unwatch(self, model: Decoder) -> None:
        """Remove the hooks from this model."""
        for watched, taps in self.watched:
            if watched is model:
                taps.remove()
        self.watched = [pair for pair in self.watched if pair[0] is not model]
