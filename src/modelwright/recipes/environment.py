"""Settings from the environment, under the names that a published toolkit gave them.

They override a recipe or file and are overridden by the command line, in the section `training` and in each stage that
has its own precision, and are part of the resolved configuration like any other setting.

    DEEPSEEK_PRECISION_MODE      a policy, or fp16, bf16 and mixed for fp16_mixed, bf16_mixed and bf16_mixed
    DEEPSEEK_AMP_ENABLED         0: FP32 in all layers in any case; 1: the mode, or where none is named bf16_mixed in
                                 place of fp32 and of auto
    DEEPSEEK_LOSS_SCALE_WINDOW   updates without overflow after which the loss scale grows
    DEEPSEEK_FP32_OPS            operators that stay in FP32, separated by commas (softmax,layernorm,loss)
"""

from collections.abc import Mapping
from typing import Any, get_args

from modelwright.core.errors import ConfigError
from modelwright.pipeline.run_config import training_names
from modelwright.precision.policy import ALWAYS_FP32, KINDS, Policy

MODE, ENABLED = "DEEPSEEK_PRECISION_MODE", "DEEPSEEK_AMP_ENABLED"
WINDOW, OPS = "DEEPSEEK_LOSS_SCALE_WINDOW", "DEEPSEEK_FP32_OPS"
NAMES = (MODE, ENABLED, WINDOW, OPS)

_OTHER_NAMES = {"fp16": "fp16_mixed", "bf16": "bf16_mixed", "mixed": "bf16_mixed"}
_OTHER_OPS = {"layernorm": "norm", "layer_norm": "norm", "rmsnorm": "norm", "cross_entropy": "loss", "sum": "reduction"}
_ANSWERS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def given_names(environment: Mapping[str, str]) -> list[str]:
    """The variables that are set and not empty."""
    return [name for name in NAMES if environment.get(name, "").strip()]


def environment_overrides(environment: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides from the variables, to merge over the configuration `base`. Raises `ConfigError` that names the
    variable.
    """
    given = {name: environment[name].strip() for name in given_names(environment)}
    sections = ["training", *(stage for stage in training_names() if _section(_section(base, stage), "precision"))]
    overrides = {name: _precision(given, _section(base, name)) for name in sections}
    return {name: {"precision": precision} for name, precision in overrides.items() if precision}


def _precision(given: Mapping[str, str], training: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of `training.precision`, or of a stage's precision."""
    precision: dict[str, Any] = {}
    policy = _policy(given, str(_section(training, "precision").get("policy", "auto")))
    if policy:
        precision["policy"] = policy
    if _is_off(given):
        precision |= {"overrides": dict.fromkeys(KINDS, ""), "adaptive": {"kind": "none", "schedule": []}}
    if WINDOW in given:
        precision["loss_scale"] = {"growth_interval": _window(given[WINDOW])}
    if OPS in given:
        precision["fp32_ops"] = _operators(given[OPS])
    return precision


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of settings; empty if it is missing or not a mapping, which parsing will reject."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _policy(given: Mapping[str, str], before: str) -> str:
    """The replacement for the policy `before`; "" if there is none."""
    mode = given.get(MODE, "").lower()
    mode = _OTHER_NAMES.get(mode, mode)
    if mode and mode not in get_args(Policy):
        raise ConfigError(f"{MODE}: {given[MODE]!r} is not one of {', '.join((*_OTHER_NAMES, *get_args(Policy)))}")
    if ENABLED not in given:
        return mode
    if _is_off(given):
        return "fp32"
    return mode or ("bf16_mixed" if before in ("fp32", "auto") else "")


def _is_off(given: Mapping[str, str]) -> bool:
    if ENABLED not in given:
        return False
    answer = given[ENABLED].lower()
    if answer not in _ANSWERS:
        raise ConfigError(f"{ENABLED}: must be 0 or 1, got {given[ENABLED]!r}")
    return not _ANSWERS[answer]


def _window(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{WINDOW}: must be a number of updates, 1 or more, got {text!r}; 1000 or 2000 is usual")
    return int(text)


def _operators(text: str) -> list[str]:
    """The named operators, and those that always stay in FP32. The policy reports wrong names."""
    named = [name.strip().lower() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys([*ALWAYS_FP32, *(_OTHER_OPS.get(name, name) for name in named)]))
