"""Published rules of thumb for a training: the rows that ship with the package or come from other packages, one
evaluator for each row, and the text of their outcomes.
"""

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.core.config import ConfigError, load_yaml, parse
from modelwright.pipeline.estimate.cost import duration, size
from modelwright_plan.intervals import daly_interval_s, young_interval_s

Subject = Literal["batch", "learning rate", "precision", "parallelism", "checkpoints"]


@dataclass(frozen=True, kw_only=True)
class RuleRow:
    """A row of the table (`rules.yaml`)."""

    name: str
    subject: Subject
    statement: str
    source: str
    """Authors, title, year."""
    section: str
    """Section, table or equation of the source."""
    date: str
    """Date on which the row was written, as YYYY-MM-DD."""
    checked: bool = False
    """True once the row's formula and numbers were compared with the source, or with several quotations of it."""
    parameters: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """The rule's numbers."""

    def number(self, name: str) -> float:
        """Returns a number by its name. Raises `ConfigError` if the row lacks it."""
        value = self.parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"rules: {self.name} needs the number {name}, got {value!r}")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class RuleTarget:
    """Facts about the training and the machine that rules depend on."""

    num_parameters: int
    """Parameters without the embedding."""
    num_all_parameters: int
    training_flops: float
    """FLOPs of the whole training without embedding and head, forward and backward; 0 if its length is unknown."""
    is_from_scratch: bool
    batch_tokens: int
    learning_rate: float
    """Peak rate."""
    reference_rate: float
    """Rate that was chosen for `reference_batch_tokens`; 0 if the training names no reference batch."""
    reference_batch_tokens: int
    """Tokens of the reference batch; 0 without one."""
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
    """Seconds to save a checkpoint; 0 if the disk was not measured."""
    checkpoint_every_s: float
    """Seconds between checkpoints; 0 means none during the training."""
    mtbf_s: float
    """Mean seconds between interruptions of the whole training; 0 if unknown."""

    @property
    def is_adaptive(self) -> bool:
        """True if the optimizer divides by a second moment, as Adam does."""
        return self.optimizer.startswith("adamw")


@dataclass(frozen=True, kw_only=True)
class RuleOutcome:
    """Result of a rule: a value if the rule applies, else the reason why it does not."""

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
    """A row with its evaluator. Entry points of the group `modelwright.rules_of_thumb` provide objects of this type."""

    row: RuleRow
    evaluate: Evaluator


def value(would_be: str, have: str) -> RuleOutcome:
    """Returns the outcome of a rule that applies."""
    return RuleOutcome(applies=True, would_be=would_be, have=have)


def refusal(because: str) -> RuleOutcome:
    """Returns the outcome of a rule that does not apply."""
    return RuleOutcome(applies=False, because=because)


WITHIN = 2.0
"""Factor by which a model may lie outside a table of model sizes that is still applied to it."""


def table_batch(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Looks up the batch of the table's model that is nearest in the logarithm of its size."""
    return _of_table(row, target, lambda size: value(f"{size:,.0f} tokens", f"{target.batch_tokens:,}"))


def table_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Looks up Adam's peak learning rate in a table by model size."""
    if not target.is_adaptive:
        return refusal(f"the rates are Adam's, and the optimizer is {target.optimizer}")
    return _of_table(row, target, lambda rate: value(f"{rate:.2g}", f"{target.learning_rate:.2g}"))


def power_law_batch(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Computes the batch in tokens: factor x compute ^ exponent."""
    return _of_compute(row, target, lambda size: value(f"{size:,.0f} tokens", f"{target.batch_tokens:,}"))


def power_law_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Computes the peak learning rate of AdamW: factor x compute ^ exponent."""
    if not target.is_adaptive:
        return refusal(f"it was fitted with AdamW, and the optimizer is {target.optimizer}")
    return _of_compute(row, target, lambda rate: value(f"{rate:.2g}", f"{target.learning_rate:.2g}"))


def logarithmic_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Computes the peak learning rate of Adam: intercept + slope x ln(parameters without the embedding)."""
    if because := _outside(row, target):
        return refusal(because)
    return value(
        f"{_logarithmic(row, target):.2g} (for batches of {row.number('batch_tokens'):,.0f} tokens)",
        f"{target.learning_rate:.2g} (for {target.batch_tokens:,})",
    )


def scaled_rate(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Scales a learning rate from its reference batch to the target's batch by the row's power of their ratio.

    The rate is the configured one if the training names the batch it was chosen for, else that of `logarithmic_rate`.
    """
    kind, fits = ("Adam", target.is_adaptive) if row.number("exponent") < 1 else ("SGD", target.optimizer == "sgd")
    if not fits:
        return refusal(f"it was derived for {kind}, and the optimizer is {target.optimizer}")
    if target.reference_batch_tokens:
        start, tokens, whose = target.reference_rate, float(target.reference_batch_tokens), "your learning_rate"
    elif "intercept" not in row.parameters:
        return refusal(
            "nobody has said which batch the rate belongs to; set training.lr_scaling and lr_reference_batch_tokens"
        )
    elif because := _outside(row, target):
        return refusal(f"there is no rate to start from: {because}")
    else:
        start, tokens, whose = _logarithmic(row, target), row.number("batch_tokens"), "Kaplan's rate"
    rate = start * (target.batch_tokens / tokens) ** row.number("exponent")
    return value(
        f"{rate:.2g} for your batch of {target.batch_tokens:,} tokens (from {whose} {start:.2g} at {tokens:,.0f})",
        f"{target.learning_rate:.2g}",
    )


def _logarithmic(row: RuleRow, target: RuleTarget) -> float:
    return row.number("intercept") + row.number("slope") * math.log(target.num_parameters)


def _outside(row: RuleRow, target: RuleTarget) -> str:
    """Returns why a rule about pretraining with Adam, fitted to some model sizes, does not apply; "" if it does."""
    low, high = row.number("least_parameters"), row.number("most_parameters")
    if not target.is_from_scratch:
        return "it is about training from random weights, and yours starts from a model"
    if not target.is_adaptive:
        return f"it was fitted with Adam, and the optimizer is {target.optimizer}"
    if not low <= target.num_parameters <= high:
        return f"it was fitted to {low:,.0f} to {high:,.0f} parameters, yours has {target.num_parameters:,}"
    return ""


def _of_table(row: RuleRow, target: RuleTarget, outcome: Callable[[float], RuleOutcome]) -> RuleOutcome:
    entries: Any = row.parameters.get("by_parameters")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"rules: {row.name} needs by_parameters, a list of pairs")
    pairs = [(float(size), float(of)) for size, of in entries]
    smallest, largest = min(pairs)[0], max(pairs)[0]
    size = target.num_all_parameters
    if not target.is_from_scratch:
        return refusal("it is about training from random weights, and yours starts from a model")
    if not smallest / WITHIN <= size <= largest * WITHIN:
        return refusal(f"its models have {smallest:,.0f} to {largest:,.0f} parameters, yours has {size:,}")
    return outcome(min(pairs, key=lambda pair: abs(math.log(pair[0] / size)))[1])


def _of_compute(row: RuleRow, target: RuleTarget, outcome: Callable[[float], RuleOutcome]) -> RuleOutcome:
    least = row.number("least_flops")
    if not target.is_from_scratch:
        return refusal("it is about training from random weights, and yours starts from a model")
    if not target.training_flops:
        return refusal("the length of the training is not known before its data is packed; set num_steps or num_tokens")
    if target.training_flops < least:
        return refusal(f"it was fitted from {least:.0e} FLOPs on, and yours takes {target.training_flops:.1e}")
    return outcome(row.number("factor") * target.training_flops ** row.number("exponent"))


CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "amx_fp16": "fp16"}
"""Format by processor flag. AVX512-FP16 is left out because PyTorch's matrix products do not use it."""
GPU_CAPABILITIES = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""Least NVIDIA compute capability with tensor cores for a format: Volta, Ampere, Ada and Hopper."""


def number_formats(device: str, cpu_info: Path = CPU_INFO) -> Set[str]:
    """Returns the formats in which `device` (`cpu` or `cuda`) multiplies matrices in hardware; FP32 is always one."""
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return {"fp32"} | {name for name, least in GPU_CAPABILITIES.items() if capability >= least}
    try:
        text = cpu_info.read_text(encoding="utf-8")
    except OSError:
        return {"fp32"}
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return {"fp32"} | {name for flag, name in CPU_FLAGS.items() if flag in line.split()}


def narrow_format(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Names a policy for processors that have instructions for its format."""
    wanted, policy = str(row.parameters["format"]), str(row.parameters["policy"])
    if wanted not in target.formats:
        known = ", ".join(sorted(target.formats))
        return refusal(f"this processor has no instructions for products in {wanted} (it has {known})")
    return value(f"precision.policy {policy}", target.policy)


def zero_stage(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Finds the lowest ZeRO stage whose states fit a device.

    Stages 1, 2 and 3 divide optimizer states, gradients and weights in turn.
    """
    if target.num_devices < 2:
        return refusal("there is one device and nobody to share states with")
    parts = [row.number(f"{name}_bytes") for name in ("optimizer", "gradient", "weight")]
    need = 0.0
    for stage in range(4):
        divided, whole = sum(parts[:stage]), sum(parts[stage:])
        need = target.num_all_parameters * (whole + divided / target.num_devices)
        if need <= target.device_bytes:
            return value(
                f"zero_stage {stage} (states of {size(need)} on a device of {size(target.device_bytes)})",
                f"zero_stage {target.zero_stage}",
            )
    return refusal(f"even stage 3 needs {size(need)} on each device of {size(target.device_bytes)}")


def model_parallel(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Finds the lowest degree of tensor parallelism in a server at which the states fit; pipelines are for several
    servers only.
    """
    if target.num_devices < 2:
        return refusal("there is one device")
    need = target.num_all_parameters * row.number("bytes_per_parameter")
    if need <= target.device_bytes:
        return refusal(f"the states of {size(need)} fit a device: data parallelism alone")
    for ranks in range(2, target.num_devices + 1):
        if target.num_devices % ranks == 0 and need / ranks <= target.device_bytes:
            have = ", ".join(f"{axis} {target.axes.get(axis, 1)}" for axis in ("tensor", "pipeline"))
            return value(f"tensor {ranks}, pipeline 1 on this server", have)
    return refusal(f"the states of {size(need)} do not fit the {target.num_devices} devices of this server together")


def young_interval(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Computes Young's first-order optimum of the checkpoint interval."""
    return _interval(row, target, young_interval_s(target.checkpoint_s, _mtbf_s(row, target)))


def daly_interval(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Computes Daly's higher-order optimum of the checkpoint interval."""
    return _interval(row, target, daly_interval_s(target.checkpoint_s, _mtbf_s(row, target)))


def _interval(row: RuleRow, target: RuleTarget, interval_s: float) -> RuleOutcome:
    if not target.checkpoint_s:
        return refusal("the disk was not measured")
    mtbf_s = _mtbf_s(row, target)
    if math.isinf(mtbf_s):
        return refusal("nobody has said how often this machine is interrupted; give --interruptions-per-hour")
    have = duration(target.checkpoint_every_s) if target.checkpoint_every_s else "none during the training"
    return value(f"a checkpoint every {duration(interval_s)} (an interruption every {duration(mtbf_s)})", have)


def _mtbf_s(row: RuleRow, target: RuleTarget) -> float:
    """Returns the given mean time between interruptions; without one, on GPUs, the published rate of a large cluster
    scaled to the number of devices.
    """
    if target.mtbf_s:
        return target.mtbf_s
    published = "gpu_hours_per_interruption"
    if target.device != "cuda" or published not in row.parameters:
        return math.inf
    return 3600 * row.number(published) / target.num_devices


GROUP = "modelwright.rules_of_thumb"
"""Group of other packages' entry points, each a `PublishedRule`."""
EVALUATORS: Mapping[str, Evaluator] = {
    "gpt3_batch": table_batch,
    "deepseek_batch": power_law_batch,
    "gpt3_rate": table_rate,
    "kaplan_rate": logarithmic_rate,
    "deepseek_rate": power_law_rate,
    "square_root_rate": scaled_rate,
    "linear_rate": scaled_rate,
    "bf16": narrow_format,
    "fp16": narrow_format,
    "fp8": narrow_format,
    "zero": zero_stage,
    "tensor_parallel": model_parallel,
    "young": young_interval,
    "daly": daly_interval,
}
"""Evaluator of each row, by the row's name."""


@dataclass(frozen=True, kw_only=True)
class _RuleFile:
    rules: tuple[RuleRow, ...]


def shipped_rules(path: Path | None = None) -> tuple[PublishedRule, ...]:
    """Reads the rules that ship with the package. path: another table, for tests. Raises `ConfigError` for a row
    without an evaluator or with a malformed date.
    """
    path = path or Path(str(files("modelwright_plan") / "rules.yaml"))
    rules = []
    for row in parse(_RuleFile, load_yaml(path)).rules:
        if row.name not in EVALUATORS:
            raise ConfigError(f"{path}: {row.name} lacks an evaluator; known are {', '.join(EVALUATORS)}")
        try:
            datetime.date.fromisoformat(row.date)
        except ValueError:
            raise ConfigError(f"{path}: {row.name}: date: {row.date!r} is not a date; write YYYY-MM-DD") from None
        rules.append(PublishedRule(row=row, evaluate=EVALUATORS[row.name]))
    return tuple(rules)


def known_rules() -> tuple[PublishedRule, ...]:
    """Returns the package's rules and those of installed packages. Raises `ConfigError` for an entry point of another
    type.
    """
    added: list[PublishedRule] = []
    for entry_point in entry_points(group=GROUP):
        rule = entry_point.load()
        if not isinstance(rule, PublishedRule):
            raise ConfigError(f"{entry_point.value}: the entry point of {GROUP} must be a PublishedRule, got {rule!r}")
        added.append(rule)
    return (*shipped_rules(), *added)


def evaluated(target: RuleTarget, rules: Sequence[PublishedRule]) -> list[tuple[RuleRow, RuleOutcome]]:
    """Evaluates every rule for the training; returns its row and outcome."""
    return [(rule.row, rule.evaluate(rule.row, target)) for rule in rules]


def rule_lines(outcomes: Sequence[tuple[RuleRow, RuleOutcome]]) -> list[str]:
    """Formats each rule as two lines: its outcome, and its source."""
    lines = []
    for row, outcome in outcomes:
        checked = "" if row.checked else ", not compared with the source since"
        lines.append(f"{row.subject}: {row.statement}: {outcome}")
        lines.append(f"  {row.source}, {row.section} (row of {row.date}{checked})")
    return lines
