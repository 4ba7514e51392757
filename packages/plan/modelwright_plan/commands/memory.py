"""`modelwright plan memory TARGET`: the tensors that a training step keeps alive over time, and a plan that needs less
memory; also the options on rows and batches that other plans share.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError, parse_count

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from modelwright.model.decoder import ModelConfig
    from modelwright.train.config import TrainConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget", metavar="BYTES", help="largest allowed peak of the plan")
    add("--max-recompute", type=float, default=0.2, metavar="FRACTION",
        help="largest share of FLOPs to recompute without a budget")  # fmt: skip
    add("--offload", choices=("host", "disk"), help="destination to which saved activations may be offloaded")
    add("--flops-per-byte", type=float, default=0.0, metavar="N",
        help="FLOPs that can be computed while a byte moves (default: measured)")  # fmt: skip
    add("--html", type=Path, metavar="FILE", help="also write the timelines as a page")


def row_len(given: int | None, usual: int, *, longest: int) -> int:
    """Returns the given row length, or the usual one. Raises `ConfigError` if it exceeds the model's context."""
    seq_len = usual if given is None else given
    if not 1 <= seq_len <= longest:
        raise ConfigError(f"--seq-len: must be from 1 to the model's context of {longest} tokens, got {seq_len}")
    return seq_len


def count(text: str, name: str) -> int:
    """Parses `4096`, `4Ki` or `2M` as an integer. Raises `ConfigError` for anything else."""
    number = -int(text[1:]) if text[:1] == "-" and text[1:].isdecimal() else parse_count(text)
    if number is None:
        raise ConfigError(f"{name}: {text!r} is not a whole number; write 4096, 4Ki or 2M")
    return number


def batch_tokens(text: str, seq_len: int) -> int:
    """Returns the tokens of a batch: the given number, or for a rounded figure such as 2M the nearest multiple of a
    row. Raises `ConfigError` for a plain number that is not a multiple of a row.
    """
    number = count(text, "--batch-tokens")
    if not text.lstrip("-").isdecimal():
        number = max(1, round(number / seq_len)) * seq_len
    if number < 1 or number % seq_len:
        raise ConfigError(f"--batch-tokens: must be a multiple of a row's {seq_len} tokens, got {number}")
    return number


def show(options: argparse.Namespace, number: Callable[[str, str], float]) -> int:
    """Prints the timeline and the plan. Raises `ConfigError` for a budget that cannot be met."""
    from modelwright.objectives.next_token import NextToken
    from modelwright.recipes.display import choose_display
    from modelwright_plan.format_memory import Known, memory_page, plan_data, plan_text
    from modelwright_plan.measured import error_text, heap_gap_text, measured_errors
    from modelwright_plan.memory_plan import plan_step

    if not 0.0 <= options.max_recompute < math.inf:
        raise ConfigError(
            f"--max-recompute: must not be negative, got {options.max_recompute}; 0.2 allows a fifth more"
        )
    if options.html and not options.html.parent.is_dir():
        raise ConfigError(f"--html: {options.html.parent} is not a folder; name a file in one that exists")
    model, train, seq_len = _training(options)
    plan = plan_step(
        model,
        train,
        NextToken,
        seq_len=seq_len,
        budget_bytes=int(number(options.budget, "--budget")) if options.budget else 0,
        more_compute=options.max_recompute,
        elsewhere=_elsewhere(options, model, train),
        progress=choose_display(sys.stderr),
    )
    errors = [error for error in measured_errors() if error.claim == "planned_memory"]
    known = Known(error=error_text(errors), gaps=heap_gap_text(errors))
    if options.html:
        page = memory_page(plan, train, title=f"Memory of a step: {options.target}", known=known)
        with writing(options.html):
            options.html.write_text(page, encoding="utf-8")
    if options.json:
        data = plan_data(plan, train, top=options.top)
        print(json.dumps({**data, "known_gaps": known.gaps}, indent=1))
        return 0
    rows = train.batch_tokens // train.gradient_accumulation_steps // seq_len
    print(
        f"{options.target}: {model.num_parameters:,} parameters, {train.precision.policy}, {train.optimizer}; "
        f"microbatches of {rows} rows of {seq_len} tokens\n"
    )
    print(plan_text(plan, train, top=options.top, known=known))
    return 0


def _elsewhere(options: argparse.Namespace, model: "ModelConfig", train: "TrainConfig"):
    """Returns the destination of offloaded activations and the cost of moving them, as given or configured, else as
    measured on this machine.
    """
    from modelwright.parallel.mesh import default_device
    from modelwright.pipeline.estimate.doctor import measure_rates
    from modelwright.train.memory.activations import ActivationCheckpointingConfig
    from modelwright.train.memory.offload import open_store
    from modelwright_plan.memory_plan import NOWHERE, OffloadTarget, measure_flops_per_byte

    configured = train.activation_checkpointing
    tier = options.offload or configured.offload
    if options.flops_per_byte < 0 or (options.flops_per_byte and tier == "none"):
        raise ConfigError(f"--flops-per-byte: must be above 0 and goes with --offload, got {options.flops_per_byte}")
    if tier == "none":
        return NOWHERE
    result, device = options.flops_per_byte or configured.flops_per_byte, default_device()
    if not result:
        config = ActivationCheckpointingConfig(
            offload=tier, offload_dir=configured.offload_dir if tier == "disk" else ""
        )
        store = open_store(config, device=device, folder=Path())
        assert store is not None
        rates = measure_rates(model, num_tokens=2048, budget_s=2.0)["effective"]
        result = measure_flops_per_byte(store, device, rates.get(train.precision.compute, rates["fp32"]))
    return OffloadTarget(tier=tier, flops_per_byte=result)


def _training(options: argparse.Namespace):
    """Returns model, training settings and row length of the target, as the options change them."""
    from dataclasses import replace

    from modelwright.train.config import TrainConfig
    from modelwright.train.precision.policy import PrecisionConfig
    from modelwright_plan.catalog import MODELS

    if options.target in MODELS:
        model = MODELS[options.target]
        seq_len = row_len(options.seq_len, model.max_seq_len, longest=model.max_seq_len)
        train = TrainConfig(num_steps=1, batch_tokens=seq_len, precision=PrecisionConfig(policy="bf16_mixed"))
    else:
        from modelwright.pipeline.resolve import resolve_inputs
        from modelwright.pipeline.stages.pack import packed_row_len
        from modelwright.recipes.load import load

        config = resolve_inputs(load(options.target, {}).config)
        model, train = config.model, config.first_training
        seq_len = row_len(options.seq_len, packed_row_len(config), longest=model.max_seq_len)
    if options.batch_tokens is not None:
        train = replace(train, batch_tokens=batch_tokens(options.batch_tokens, seq_len))
    policy = "fp32" if train.precision.policy == "auto" else train.precision.policy
    if options.compute:
        policy = {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16_mixed", "fp8": "fp8"}.get(options.compute, "bf16_mixed")
    train = replace(train, precision=replace(train.precision, policy=policy))
    if train.batch_tokens % seq_len:
        raise ConfigError(f"--seq-len: {seq_len} does not divide a batch of {train.batch_tokens} tokens")
    return model, train, seq_len
