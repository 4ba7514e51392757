"""The space of a search: axes of named values, and the model shape or training settings that a choice on them makes.

Every axis has finitely many values, so that a choice is a plain mapping that a journal can store, equal candidates are
recognized, and every strategy, including a controller with softmax outputs, works on every space.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from modelwright.core.config import ConfigError, did_you_mean, load_yaml
from modelwright.model.decoder import AttentionGate, ModelConfig
from modelwright.train.config import TrainConfig
from modelwright_search.config import SPACES

Value = int | float | str
Choices = Mapping[str, Value]
"""Value on each axis, by the axis's name."""


@dataclass(frozen=True)
class Axis:
    """An axis of the space."""

    name: str
    values: tuple[Value, ...]
    is_ordered: bool
    """True if neighbors in `values` resemble each other, as numbers in ascending order do."""


@dataclass(frozen=True)
class ModelCandidate:
    """A variant of the run: the model's shape and the settings of its first training."""

    model: ModelConfig
    training: TrainConfig


@dataclass(frozen=True, kw_only=True)
class Space:
    """All candidates of a search."""

    name: str
    axes: tuple[Axis, ...]
    standard: ModelCandidate
    """The run's own shape and settings."""
    standard_choices: Choices
    """Values of the run itself, which need not be among those of the axes."""
    apply: Callable[[ModelCandidate, Choices], ModelCandidate]
    """Makes a candidate from the standard one and choices on all axes. Raises `ConfigError` for invalid choices."""
    changes_shape: bool

    def candidate(self, choices: Choices) -> ModelCandidate:
        """Returns the candidate of these choices, which may be off the grid."""
        assert set(choices) == {axis.name for axis in self.axes}, choices
        # Choices do not say everything: a `gqa` of the run may have another number of key/value heads than ours.
        return self.standard if choices == self.standard_choices else self.apply(self.standard, choices)

    def settings(self, candidate: ModelCandidate, stage: str) -> dict[str, Any]:
        """Returns the settings in which a candidate differs from the standard one, in the form of a run's YAML. stage:
        name of the training.
        """
        standard = self.standard
        sections = {"model": (standard.model, candidate.model), stage: (standard.training, candidate.training)}
        return {
            name: changed
            for name, (before, after) in sections.items()
            if (changed := {key: value for key, value in vars(after).items() if value != getattr(before, key)})
        }


ATTENTION_KINDS = ("mha", "gqa", "mqa")
"""Multi-head attention, grouped-query attention (Ainslie et al. 2023) with half as many key/value heads or fewer, and
multi-query attention (Shazeer 2019)."""
GATES: tuple[AttentionGate, ...] = ("none", "head", "element")


def num_kv_heads(kind: str, num_heads: int) -> int:
    """Returns the key/value heads of a kind of attention: for `gqa` the largest proper divisor of the query heads."""
    if kind == "mha":
        return num_heads
    if kind == "mqa":
        return 1
    return next(divisor for divisor in range(max(1, num_heads // 2), 0, -1) if num_heads % divisor == 0)


def kind_of(model: ModelConfig) -> str:
    """Returns the kind of attention of a shape."""
    if model.num_kv_heads == model.num_heads:
        return "mha"
    return "mqa" if model.num_kv_heads == 1 else "gqa"


def architecture(model: ModelConfig, training: TrainConfig) -> Space:
    """Returns the space of depth, width, heads, kind of attention, gate and feed-forward width around a model's shape.
    Head width, vocabulary and context stay the same.
    """

    def with_shape(standard: ModelCandidate, choices: Choices) -> ModelCandidate:
        heads = cast(int, choices["heads"])
        model = replace(
            standard.model,
            num_layers=cast(int, choices["layers"]),
            model_dim=cast(int, choices["width"]),
            num_heads=heads,
            num_kv_heads=num_kv_heads(cast(str, choices["attention"]), heads),
            attention_gate=cast(AttentionGate, choices["gate"]),
            ffn_dim=cast(int, choices["ffn"]),
        )
        return ModelCandidate(model, standard.training)

    standard = {
        "layers": model.num_layers,
        "width": model.model_dim,
        "heads": model.num_heads,
        "attention": kind_of(model),
        "gate": model.attention_gate,
        "ffn": model.ffn_dim,
    }
    axes = (
        Axis("layers", _scaled(model.num_layers, (0.5, 0.75, 1.0, 1.5, 2.0), 1), is_ordered=True),
        Axis("width", _scaled(model.model_dim, (0.5, 0.75, 1.0, 1.25, 1.5), 16), is_ordered=True),
        Axis("heads", _scaled(model.num_heads, (0.5, 1.0, 1.5, 2.0), 1), is_ordered=True),
        Axis("attention", ATTENTION_KINDS, is_ordered=False),
        Axis("gate", GATES, is_ordered=False),
        Axis("ffn", _scaled(model.ffn_dim, (0.5, 0.75, 1.0, 1.5, 2.0), 16), is_ordered=True),
    )
    return Space(
        name="architecture",
        axes=axes,
        standard=ModelCandidate(model, training),
        standard_choices=standard,
        apply=with_shape,
        changes_shape=True,
    )


def _scaled(value: int, factors: Sequence[float], multiple: int) -> tuple[int, ...]:
    """Scales a number by each factor, rounded to multiples of `multiple`; drops duplicates due to rounding."""
    return tuple(sorted({max(multiple, round(value * factor / multiple) * multiple) for factor in factors}))


def hyperparameters(model: ModelConfig, training: TrainConfig, seq_len: int) -> Space:
    """Returns the space of learning rate, batch and weight decay around those of a training. seq_len: tokens of a row;
    a batch is a whole number of rows.
    """
    rows = training.batch_tokens // seq_len
    batches = {round(rows * factor) * seq_len for factor in (0.5, 1.0, 2.0, 4.0) if rows * factor >= 1}
    fits = [batch for batch in sorted(batches) if batch % (seq_len * training.gradient_accumulation_steps) == 0]
    decays = tuple(sorted({0.0, 0.01, 0.03, 0.1, 0.3, training.weight_decay}))
    rates = tuple(float(f"{training.learning_rate * 2 ** (half / 2):.3g}") for half in range(-4, 5))
    axes = (
        Axis("learning_rate", rates, is_ordered=True),
        Axis("batch_tokens", tuple(fits), is_ordered=True),
        Axis("weight_decay", decays, is_ordered=True),
    )
    return Space(
        name="hyperparameters",
        axes=axes,
        standard=ModelCandidate(model, training),
        standard_choices={axis.name: getattr(training, axis.name) for axis in axes},
        apply=lambda standard, choices: ModelCandidate(
            standard.model, replace(standard.training, **cast(Any, choices))
        ),
        changes_shape=False,
    )


def space_of(word: str, model: ModelConfig, training: TrainConfig, seq_len: int) -> Space:
    """Returns the space that a user names: one of `SPACES`, or a YAML file with `space: NAME` and, under the names of
    axes, lists of other values. Raises `ConfigError` for an unknown axis and for an invalid value.
    """
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        lists = load_yaml(path)
        word = str(lists.pop("space", SPACES[0]))
    else:
        path, lists = Path(), {}
    if word not in SPACES:
        where = f"{path}: space" if lists or path.name else "--space"
        raise ConfigError(f"{where}: {word!r} is not one of {', '.join(SPACES)}{did_you_mean(word, SPACES)}")
    space = architecture(model, training) if word == SPACES[0] else hyperparameters(model, training, seq_len)
    return narrowed(space, lists, str(path)) if lists else space


def narrowed(space: Space, lists: Mapping[str, Any], where: str) -> Space:
    """Returns the space with other values on some axes. where: file that they come from, for errors."""
    names = [axis.name for axis in space.axes]
    axes = {axis.name: axis for axis in space.axes}
    for name, values in lists.items():
        if name not in axes:
            raise ConfigError(f"{where}: {name}: unknown axis{did_you_mean(name, names)} (known: {', '.join(names)})")
        axes[name] = replace(axes[name], values=_values(axes[name], values, f"{where}: {name}"))
    changed = replace(space, axes=tuple(axes.values()))
    for axis in changed.axes:
        for value in axis.values:
            try:
                changed.candidate({**space.standard_choices, axis.name: value})
            except ConfigError as error:
                raise ConfigError(f"{where}: {axis.name}: {value!r} makes no model or training ({error})") from None
    return changed


def _values(axis: Axis, values: Any, where: str) -> tuple[Value, ...]:
    """Checks a user's values of one axis."""
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: must be a list of values, such as [{', '.join(map(str, axis.values[:3]))}]")
    known, items = axis.values[0], cast(list[Any], values)
    if not axis.is_ordered and (wrong := [item for item in items if item not in axis.values]):
        raise ConfigError(f"{where}: {wrong[0]!r} is not one of {', '.join(map(str, axis.values))}")
    kinds = (int, float) if isinstance(known, float) else (type(known),)
    if wrong := [item for item in items if not isinstance(item, kinds) or isinstance(item, bool)]:
        raise ConfigError(f"{where}: {wrong[0]!r} is not of the kind of {known!r}")
    numbers = [float(item) if isinstance(known, float) else item for item in items]
    return tuple(sorted(set(numbers)) if axis.is_ordered else dict.fromkeys(numbers))
