"""Distillation: a student learns a teacher's hidden states, attention and logits, each in its own part of the training.

Sources: hidden states through learned projections (Jiao et al. 2020, TinyBERT), attention (`attention_targets.py`),
logits with a temperature beside hard labels (Hinton et al. 2015). Rows that the student generates itself come from
`on_policy_distillation.py`.

Legend: B rows, T tokens, D width of the student, E width of the teacher.

Which layer of a teacher each layer of a student is compared with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import EAGER_BLOCKS, LAYER_OUTPUTS, WHOLE_LAYERS, WHOLE_ROWS
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.layer_taps import LayerTaps
from modelwright.objectives.attention_targets import AttentionForm, AttentionTargets, attention_targets
from modelwright.objectives.next_token import num_targets, numbered_batches
from modelwright.objectives.teacher import TeacherModel
from modelwright.objectives.teacher_cache import LOG_PROBS, TOKENS, TeacherCache
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.distillation_loss import FORWARD, Teacher, TopTokens
from modelwright.ops.divergences import DivergenceKind
from modelwright.train.objective import BatchSource, Metric, Objective, Terms


def even_layer_map(num_layers: int, num_teacher_layers: int) -> tuple[int, ...]:
    """The teacher's layer for each of the student's: both end with their last, equally far apart (TinyBERT)."""
    step = num_teacher_layers / num_layers
    return tuple(max(0, round((layer + 1) * step) - 1) for layer in range(num_layers))


def layer_pairs(layer_map: Sequence[int], num_layers: int, num_teacher_layers: int) -> list[tuple[int, int]]:
    """The layers of student and teacher that are compared. layer_map: for each layer of the student that of the
    teacher, -1 for none; empty maps them evenly. Raises `ConfigError` for an impossible map.
    """
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
"""The extra of batches whose labels are tokens that the student has drawn, which are no truth to learn: 1 where a
completion begins, 0 elsewhere."""


PART_NEEDS: Mapping[PartName, frozenset[str]] = {
    "hidden": frozenset({LAYER_OUTPUTS, EAGER_BLOCKS}),
    "attention": frozenset({WHOLE_LAYERS, WHOLE_ROWS, EAGER_BLOCKS}),
    "logits": frozenset(),
}
"""What each part needs of a run."""


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
        """The weight at a share of the training in [0, 1]."""
        is_on = self.start <= progress < self.end or progress == self.end == 1.0
        return self.weight if is_on else 0.0


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """What is learned of the teacher. layer_map: for each layer of the student, that of the teacher which it is
    compared with, -1 for none; empty maps the layers evenly.
    """

    parts: Mapping[PartName, LossPart]
    temperature: float = 1.0
    label_share: float = 0.2
    """Share of the hard labels in the part `logits`."""
    divergence: DivergenceKind = FORWARD
    """From the teacher's distribution, in the part `logits`."""
    attention_form: AttentionForm = "relations"
    layer_map: tuple[int, ...] = ()
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def used(self) -> list[PartName]:
        """The parts that have a weight at some time."""
        return [name for name in PARTS if name in self.parts and self.parts[name].weight > 0]

    @property
    def reads_layers(self) -> bool:
        """Whether some part compares what layers compute."""
        return bool({"hidden", "attention"} & set(self.used))


def check_shapes(settings: DistillationSettings, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise `ConfigError` for a layer map or a form of attention that is impossible between models of these shapes."""
    if settings.reads_layers:
        pairs = layer_pairs(settings.layer_map, student.num_layers, teacher.num_layers)
        if "attention" in settings.used:
            attention_targets(settings.attention_form, student, teacher, pairs)


@dataclass(kw_only=True)
class Distillation(Objective):
    """Three terms, `hidden`, `attention` and `logits`, whose factors follow the step. Held-out rows are judged by the
    factors at the end of training, so that evaluations can be compared with each other.

    num_steps: updates of the whole training, which phases are shares of. cache: stored probabilities of the teacher in
    place of its logits.
    """

    metric_names = ("divergence", "label_loss")

    source: BatchSource
    teacher: TeacherModel
    settings: DistillationSettings
    num_steps: int
    cache: TeacherCache | None = None
    needs: frozenset[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    watched: list[tuple[Decoder, LayerTaps]] = field(default_factory=list[tuple[Decoder, LayerTaps]], init=False)
    """The model whose layers are read, and how."""

    def __post_init__(self) -> None:
        self.needs = frozenset[str]().union(*(PART_NEEDS[name] for name in self.used))

    @property
    def used(self) -> list[PartName]:
        """The parts that have a weight at some time."""
        return self.settings.used

    def layer_pairs(self, student: ModelConfig) -> list[tuple[int, int]]:
        """The layers of student and teacher whose outputs are compared. Raises `ConfigError` for an impossible map."""
        return self._mapped(student) if "hidden" in self.used else []

    def _mapped(self, student: ModelConfig) -> list[tuple[int, int]]:
        return layer_pairs(self.settings.layer_map, student.num_layers, self.teacher.config.num_layers)

    def attention_targets(self, student: ModelConfig) -> AttentionTargets:
        """What is compared of attention. Raises `ConfigError` for models of which it cannot be."""
        form = self.settings.attention_form
        return attention_targets(form, student, self.teacher.config, self._mapped(student))

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        """A projection from the student's width to the teacher's for each pair of layers; the identity at first where
        the widths are equal.
        """
        width = self.teacher.config.model_dim
        pairs = self.layer_pairs(config)
        modules = {_projection(own): nn.Linear(config.model_dim, width, bias=False) for own, _ in pairs}
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
        return {name: counts[name] * (_factor(name) in batch.extras) for name in self.used}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        outputs, heads = self._watch(model).take() if self.settings.reads_layers else ([], [])
        # FSDP gathers a layer's weights for backward when the gradient of its output arrives: each must get one, though
        # it be zero, also where what is learned branches off inside of the layer.
        nothing = 0.0 * output.sum(dtype=torch.promote_types(output.dtype, torch.float32))
        losses: dict[str, Tensor] = dict.fromkeys(self.used, nothing)
        metrics: dict[str, Metric] = dict.fromkeys(self.metric_names, (nothing.detach(), nothing.detach()))
        if _factor("hidden") in batch.extras:
            losses["hidden"] = nothing + _scaled(self._hidden_loss(outputs, batch, model), "hidden", batch)
        if _factor("attention") in batch.extras:
            attention_loss = self.attention_targets(model.config).loss(heads, batch)
            losses["attention"] = nothing + _scaled(attention_loss, "attention", batch)
        if _factor("logits") in batch.extras:
            loss, divergence, label_loss = model.distillation_loss(
                output,
                batch.labels_BT,
                self._targets(batch),
                temperature=self.settings.temperature,
                label_share=0.0 if SAMPLED in batch.extras else self.settings.label_share,
                chunk_tokens=self.settings.chunk_tokens,
            )
            losses["logits"] = _scaled(loss, "logits", batch)
            metrics = {"divergence": (divergence, num_targets(batch)), "label_loss": (label_loss, num_targets(batch))}
        return Terms(losses, metrics)

    def _hidden_loss(self, outputs: Sequence[Tensor], batch: TokenBatch, model: Decoder) -> Tensor:
        """Sum over tokens of the mean squared difference, over width and layers."""
        pairs, real_BT = self.layer_pairs(model.config), batch.segments_BT >= 0
        losses: list[Tensor] = []
        for (own, _), hidden_BTD in zip(pairs, outputs, strict=True):
            wide_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
            gap_BTE = model.head_output(_projection(own), wide_BTD) - batch.extras[_output(own)]
            losses.append((gap_BTE.square().mean(dim=-1) * real_BT).sum())
        return torch.stack(losses).sum() / len(losses)

    def _targets(self, batch: TokenBatch) -> Teacher:
        if self.cache is None:
            return self.teacher.targets(batch.extras["teacher_hidden_BTE"], self.settings.divergence)
        log_probs_BTK, tokens_BTK = batch.extras[LOG_PROBS], batch.extras[TOKENS]
        return TopTokens(log_probs_NK=log_probs_BTK.flatten(0, 1), tokens_NK=tokens_BTK.flatten(0, 1))

    def in_force(self, progress: float) -> dict[PartName, float]:
        """The parts that are learned at this share of the training, with their weights."""
        factors: dict[PartName, float] = {name: self.settings.parts[name].at(progress) for name in self.used}
        return {name: factor for name, factor in factors.items() if factor > 0}

    def with_teacher(self, batch: TokenBatch, model: Decoder, progress: float) -> TokenBatch:
        """The rows with what the parts in force at this share of the training need."""
        factors = self.in_force(progress)
        active = list(factors)
        device = batch.input_ids_BT.device
        extras: dict[str, Tensor] = {
            _factor(name): torch.full((batch.num_rows,), factors[name], dtype=torch.float64, device=device)
            for name in active
        }
        if self.settings.reads_layers:
            self._watch(model)
        if "logits" in active and self.cache is not None:
            extras |= self.cache.extras(batch)
        if {"hidden", "attention"} & set(active) or ("logits" in active and self.cache is None):
            extras |= self._teacher_extras(batch, model.config, active)
        return replace(batch, extras={**batch.extras, **extras})

    def _teacher_extras(
        self, batch: TokenBatch, student: ModelConfig, active: Sequence[PartName]
    ) -> Mapping[str, Tensor]:
        pairs = self.layer_pairs(student) if "hidden" in active else []
        layers = list(dict.fromkeys(layer for _, layer in pairs))
        targets = self.attention_targets(student) if "attention" in active else None
        heads = list(dict.fromkeys(targets.teacher_layers)) if targets else []
        found = self.teacher.output(batch, outputs=layers, heads=heads)
        extras = {_output(own): found.outputs[layers.index(layer)] for own, layer in pairs}
        if targets:
            extras |= targets.extras(dict(zip(heads, found.heads, strict=True)))
        if "logits" in active and self.cache is None:
            extras["teacher_hidden_BTE"] = found.hidden_BTE
        return {name: values.to(batch.input_ids_BT.device) for name, values in extras.items()}

    def _watch(self, model: Decoder) -> LayerTaps:
        """How this model's layers are read; hooks are set once."""
        for watched, taps in self.watched:
            if watched is model:
                return taps
        heads = self.attention_targets(model.config).student_layers if "attention" in self.used else []
        taps = LayerTaps(model, outputs=[own for own, _ in self.layer_pairs(model.config)], heads=heads)
        self.watched.append((model, taps))
        return taps

    def unwatch(self, model: Decoder) -> None:
        """Read this model's layers no longer."""
        for watched, taps in self.watched:
            if watched is model:
                taps.remove()
        self.watched = [pair for pair in self.watched if pair[0] is not model]


def _projection(layer: int) -> str:
    return f"distillation_{layer}"


def _factor(name: str) -> str:
    return f"{name}_factor_B"


def _output(layer: int) -> str:
    return f"output_{layer}_BTE"


def _scaled(loss: Tensor, name: str, batch: TokenBatch) -> Tensor:
    """Times the part's factor in this step; rows of padding have a factor of zero."""
    return loss * batch.extras[_factor(name)].max()
