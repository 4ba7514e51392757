"""Evaluators of rules about number formats, parallelism and checkpoints."""

import math

from modelwright.pipeline.estimate.cost import duration, size
from modelwright_plan.rules.rule import RuleOutcome, RuleRow, RuleTarget, refusal, value
from modelwright_plan.spot.intervals import daly_interval_s, young_interval_s


def narrow_format(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """A policy for processors that have instructions for its format."""
    wanted, policy = str(row.parameters["format"]), str(row.parameters["policy"])
    if wanted not in target.formats:
        known = ", ".join(sorted(target.formats))
        return refusal(f"this processor has no instructions for products in {wanted} (it has {known})")
    return value(f"precision.policy {policy}", target.policy)


def zero_stage(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """The lowest ZeRO stage whose states fit a device: stages divide optimizer states, gradients, weights in turn."""
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
    """The least tensor parallelism with which the states fit, within a server; pipelines across servers only."""
    if target.num_devices < 2:
        return refusal("there is one device")
    need = target.num_all_parameters * row.number("bytes_per_parameter")
    if need <= target.device_bytes:
        return refusal(f"the states of {size(need)} fit a device: data parallelism alone")
    for ranks in range(2, target.num_devices + 1):
        if target.num_devices % ranks == 0 and need / ranks <= target.device_bytes:
            return value(f"tensor {ranks}, pipeline 1 on this server", _axes(target))
    return refusal(f"the states of {size(need)} do not fit the {target.num_devices} devices of this server together")


def young_interval(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Young's first-order optimum."""
    return _interval(row, target, young_interval_s(target.checkpoint_s, _mtbf_s(row, target)))


def daly_interval(row: RuleRow, target: RuleTarget) -> RuleOutcome:
    """Daly's higher-order optimum."""
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
    """As given, else on GPUs as published for a large cluster, in proportion to the number of devices."""
    if target.mtbf_s:
        return target.mtbf_s
    published = "gpu_hours_per_interruption"
    if target.device != "cuda" or published not in row.parameters:
        return math.inf
    return 3600 * row.number(published) / target.num_devices


def _axes(target: RuleTarget) -> str:
    return ", ".join(f"{axis} {target.axes.get(axis, 1)}" for axis in ("tensor", "pipeline"))
