"""A published rule of thumb, the training that it is evaluated for, and what it says about it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelwright.core.errors import ConfigError

Subject = Literal["batch", "learning rate", "precision", "parallelism", "checkpoints"]


@dataclass(frozen=True, kw_only=True)
class RuleRow:
    """One row of the table (`rules.yaml`)."""

    name: str
    subject: Subject
    statement: str
    source: str
    """Authors, title, year."""
    section: str
    """Where in the source: a section, a table or an equation."""
    date: str
    """When the row was written, as YYYY-MM-DD."""
    checked: bool = False
    """Whether the row's formula and numbers were compared with the source, or with what several others quote of it."""
    parameters: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """The rule's numbers."""

    def number(self, name: str) -> float:
        """One of the numbers. Raises `ConfigError` if the row lacks it."""
        value = self.parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"rules: {self.name} needs the number {name}, got {value!r}")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class RuleTarget:
    """The training and the machine, as far as rules ask for them."""

    num_parameters: int
    """Without the embedding."""
    num_all_parameters: int
    training_flops: float
    """FLOPs of the whole training without embedding and head, forward and backward; 0 if its length is not known."""
    is_from_scratch: bool
    batch_tokens: int
    learning_rate: float
    """Peak rate."""
    reference_rate: float
    reference_batch_tokens: int
    """The rate that belongs to a batch of so many tokens, where the training says so; else 0."""
    optimizer: str
    policy: str
    device: str
    """`cpu` or `cuda`."""
    formats: Collection[str]
    """Number formats for whose products the processor has instructions: fp32, bf16, fp16, fp8."""
    num_devices: int
    device_bytes: float
    """Memory of one device, or this process's share of the host's."""
    axes: Mapping[str, int]
    zero_stage: int
    checkpoint_s: float
    """Seconds for one checkpoint, 0 if the disk was not measured."""
    checkpoint_every_s: float
    """0 for none."""
    mtbf_s: float
    """Mean seconds between interruptions of the whole training, 0 if nobody has said."""

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer divides by a second moment, as Adam does."""
        return self.optimizer.startswith("adamw")


@dataclass(frozen=True, kw_only=True)
class RuleOutcome:
    """What a rule says: a value where it applies, else why it does not."""

    applies: bool
    would_be: str = ""
    have: str = ""
    because: str = ""

    def __str__(self) -> str:
        if self.applies:
            return f"applies: would be {self.would_be}, you have {self.have}"
        return f"does not apply, because {self.because}"


Evaluator = Callable[[RuleRow, RuleTarget], RuleOutcome]


@dataclass(frozen=True, kw_only=True)
class PublishedRule:
    """A row with its evaluator: what an entry point of the group `modelwright.rules_of_thumb` must be."""

    row: RuleRow
    evaluate: Evaluator


def value(would_be: str, have: str) -> RuleOutcome:
    """The rule applies."""
    return RuleOutcome(applies=True, would_be=would_be, have=have)


def refusal(because: str) -> RuleOutcome:
    """The rule does not apply."""
    return RuleOutcome(applies=False, because=because)
