"""`modelwright plan`: layout, memory, cost, spot instances, energy and advice, one plan for each subcommand."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError, parse_quantity
from modelwright_plan.commands import advice, cost, energy, memory, spot

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from modelwright.pipeline.estimate.layout import ComputeFormat, TrainingJob
    from modelwright.train.precision.policy import PrecisionConfig
    from modelwright_plan.layout_search import Cluster
    from modelwright_plan.step_time import ComputeRate


_NAMES = ("layout", "memory", "cost", "spot", "energy", "advice", "published")
_SIZES = (
    "TARGET: a recipe, a YAML file, a run directory, or a well-known size (gpt3-175b, llama2-7b, "
    "llama3.1-8b, llama3.1-70b, llama3.1-405b). "
    "Sizes, rates and counts take prefixes and units: 80GB, 64GiB, 900M; M is 1,000,000 and Mi 1,048,576."
)


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "plan",
        "Plan a training before it runs.",
        example="modelwright plan layout llama3.1-8b --hosts 2 --devices-per-host 8 --device h100",
    )
    commands = parser.add_subparsers(dest="command", metavar="|".join(_NAMES), required=True)
    for_layout = commands.add_parser(
        "layout",
        help="propose parallel layouts for some hosts, the fastest first",
        description="Propose layouts for training a model on some hosts, the fastest first, and say why others do "
        "not fit. Without --device the rates of this machine's own products are measured, and the links' rates "
        f"must be given for more than one device. {_SIZES}",
        epilog="example: modelwright plan layout llama3.1-8b --hosts 2 --devices-per-host 8 --device h100",
        allow_abbrev=False,
    )
    _shared_options(for_layout)
    add = for_layout.add_argument
    add("--hosts", type=int, default=1, help="number of hosts (default: 1)")
    add("--devices-per-host", type=int, default=1, help="number of GPUs of a host; on CPUs, of processes (default: 1)")
    add("--device", choices=("h100", "a100", "v100"), help="accelerator whose data sheet gives memory and rates")
    add("--device-memory", metavar="BYTES", help="memory of one device")
    add("--flops", metavar="PER_S", help="peak FLOP/s of one device")
    add("--host-bandwidth", metavar="BYTES_PER_S", help="rate of one device to the others in its host")
    add("--network-bandwidth", metavar="BYTES_PER_S", help="rate of one device to other hosts")
    add("--efficiency", type=float, metavar="FRACTION",
        help="share of the peak that training reaches, all its work included (default: by operator)")  # fmt: skip
    for_advice = commands.add_parser(
        "advice",
        help="name the bottleneck of a training on this machine, helpful techniques and published rules",
        description="Survey this machine as `modelwright doctor` does, and say what limits the target's first "
        "training here, which techniques help, and what published rules of thumb say (docs/planning.md).",
        epilog="example: modelwright plan advice quickstart --nproc 2",
        allow_abbrev=False,
    )
    advice.add_options(for_advice)
    for_memory = commands.add_parser(
        "memory",
        help="trace the memory of one training step, and plan one that takes less",
        description="Trace one training step on one process, without computing it: what is alive when, and a plan of "
        f"what to recompute or offload so that it takes less memory. {_SIZES}",
        epilog="example: modelwright plan memory quickstart --budget 180MiB --offload disk",
        allow_abbrev=False,
    )
    _shared_options(for_memory)
    memory.add_options(for_memory)
    for_cost = commands.add_parser(
        "cost",
        help="price training, serving, storage and traffic, line by line",
        description="Price a workload from a dated table of list prices, and show which assumption the total depends "
        f"on most. {cost.TARGETS}",
        epilog="example: modelwright plan cost runs/quickstart --instance c7i.xlarge --months 1",
        allow_abbrev=False,
    )
    cost.add_options(for_cost)
    for_spot = commands.add_parser(
        "spot",
        help="choose a checkpoint interval on spot instances; estimate the time and cost of a job",
        description="Choose the checkpoint interval of a job on spot instances by Daly's formula, estimate its time "
        "and cost, and write it as a SkyPilot task.",
        epilog="example: modelwright plan spot --work-hours 40 --interruptions-per-hour 0.2 --stall-s 5 "
        "--recovery-s 180 --instance g5.xlarge",
        allow_abbrev=False,
    )
    spot.add_options(for_spot)
    for_energy = commands.add_parser(
        "energy",
        help="find the start of a job that causes the least carbon dioxide",
        description="Find the start of a job that causes the least carbon dioxide, by an hourly table of the intensity "
        "of its electricity.",
        epilog="example: modelwright plan energy --run runs/quickstart --carbon tomorrow.csv",
        allow_abbrev=False,
    )
    energy.add_options(for_energy)
    for_published = commands.add_parser(
        "published",
        help="compare predicted times and memory with published runs",
        description="Predict step, utilization and memory of published runs (torchtitan, Megatron-LM, Llama 3, "
        "llm-foundry), and print them beside the published figures in Markdown.",
        epilog="example: modelwright plan published",
        allow_abbrev=False,
    )
    for_published.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _shared_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET")
    add("--batch-tokens", metavar="N", help="tokens of an update (default: the recipe's, else 4Mi); 2M is the nearest "
        "number of whole rows")  # fmt: skip
    add("--seq-len", metavar="N", help="tokens of a row (default: the recipe's, else the model's context)")
    add("--compute", choices=("fp32", "tf32", "bf16", "fp16", "fp8"),
        help="format of products (default: the recipe's, else bf16, fp16 on a device without it)")  # fmt: skip
    add("--top", type=int, default=8, help="number of layouts, or tensors, to show (default: 8)")
    add("--json", action="store_true", help="print everything as JSON")


def plan(words: Sequence[str]) -> int:
    """`modelwright plan`"""
    options = parser().parse_args(words)
    if getattr(options, "seq_len", None) is not None:
        options.seq_len = memory.count(options.seq_len, "--seq-len")
    return _SHOWN[options.command](options)


def _layout(options: argparse.Namespace) -> int:
    for name in ("hosts", "devices-per-host", "top"):
        if (given := getattr(options, name.replace("-", "_"))) < 1:
            raise ConfigError(f"--{name}: must be at least 1, got {given}")
    from modelwright_plan.format_layouts import proposal_data, proposal_text
    from modelwright_plan.layout_search import propose
    from modelwright_plan.measured import error_text, measured_errors

    job, notes = _job(options)
    cluster = _cluster(options, job)
    proposal = propose(job, cluster)
    if options.json:
        print(json.dumps(proposal_data(job, cluster, proposal), indent=1))
        return 0
    known_error = error_text(measured_errors())
    print(proposal_text(job, cluster, proposal, top=options.top, known_error=known_error, notes=notes))
    return 0


def _published(options: argparse.Namespace) -> int:
    from modelwright_plan.published import comparisons, published_data, published_table

    found = comparisons()
    print(json.dumps(published_data(found), indent=1) if options.json else published_table(found))
    return 0


_SHOWN: dict[str, Callable[[argparse.Namespace], int]] = {
    "layout": _layout,
    "memory": lambda options: memory.show(options, number),
    "cost": cost.show,
    "spot": spot.show,
    "energy": energy.show,
    "advice": advice.show,
    "published": _published,
}
"""The only list of the plans, by subcommand."""


def number(text: str, name: str) -> float:
    """Parses `80GB`, `64GiB`, `9e14` or `900M`. Raises `ConfigError` for anything else."""
    quantity = parse_quantity(text)
    if quantity is None or quantity.value <= 0:
        raise ConfigError(f"{name}: {text!r} is not a size above 0; write 80GB, 64GiB or 8e10")
    return float(quantity.value)


def _job(options: argparse.Namespace):
    """Returns the job, and notes on the choices made for it."""
    from modelwright.pipeline.estimate.layout import TrainingJob
    from modelwright_plan.catalog import DEVICES, MODELS

    if options.target in MODELS:
        model, seq_len, batch_tokens, requested = MODELS[options.target], 0, 2**22, "bf16"
    else:
        from modelwright.pipeline.resolve import resolve_inputs
        from modelwright.pipeline.stages.pack import packed_row_len
        from modelwright.recipes.load import load

        config = resolve_inputs(load(options.target, {}).config)
        training = config.first_training
        model, seq_len, batch_tokens = config.model, packed_row_len(config), training.batch_tokens
        requested = _format_of(training.precision, options.device)
    seq_len = memory.row_len(options.seq_len, seq_len or model.max_seq_len, longest=model.max_seq_len)
    if options.batch_tokens is not None:
        batch_tokens = memory.batch_tokens(options.batch_tokens, seq_len)
    elif batch_tokens % seq_len:
        raise ConfigError(f"--batch-tokens: must be a multiple of a row's {seq_len} tokens, got {batch_tokens}")
    compute, notes = options.compute or requested, list[str]()
    rates = DEVICES[options.device].peaks if options.device else {}
    if not options.compute and rates and requested == "bf16" and "bf16" not in rates and "fp16" in rates:
        compute = "fp16"
        notes.append(f"{options.device} has no products in BF16: planned in FP16 (precision.policy: fp16_mixed)")
    return TrainingJob(model=model, seq_len=seq_len, batch_tokens=batch_tokens, compute=compute), notes


def _format_of(precision: "PrecisionConfig", device: str | None) -> "ComputeFormat":
    """Returns the format of most matrix products of a recipe on a device, or on this machine."""
    from modelwright_plan.catalog import DEVICES

    if precision.policy == "auto" and device and "bf16" in DEVICES[device].peaks:
        return "bf16"  # what measured rates would choose there; FP16 is not chosen unasked
    compute = "fp32" if precision.policy == "auto" else precision.compute
    if compute in ("fp32", "int8"):
        return "tf32" if precision.fp32_matmul == "tf32" and device else "fp32"
    return compute


def _cluster(options: argparse.Namespace, job: "TrainingJob") -> "Cluster":
    from modelwright.core.resources import hardware
    from modelwright.pipeline.resolve import matrix_shapes
    from modelwright_plan.catalog import DEVICES
    from modelwright_plan.layout_search import Cluster

    sheet = DEVICES.get(options.device)
    given = {
        name: number(value, f"--{name}")
        for name in ("device-memory", "flops", "host-bandwidth", "network-bandwidth")
        if (value := getattr(options, name.replace("-", "_")))
    }
    alone = options.hosts * options.devices_per_host == 1
    if sheet is None and not alone and not {"host-bandwidth", "network-bandwidth"} <= given.keys():
        raise ConfigError("--host-bandwidth: give it and --network-bandwidth, or --device with a data sheet")
    if sheet is None and "flops" not in given:
        largest = max(outputs * inputs for outputs, inputs in matrix_shapes(job.model))
        if 8 * largest > hardware()["memory_bytes"]:
            raise ConfigError(
                f"--flops: the model's largest matrix ({largest:.3g} weights) is too large to be measured in this "
                "machine's memory; give --flops PER_S, or --device with a data sheet"
            )
    memory = given.get("device-memory") or (
        sheet.memory_bytes if sheet else hardware()["memory_bytes"] / options.devices_per_host
    )
    return Cluster(
        num_hosts=options.hosts,
        devices_per_host=options.devices_per_host,
        memory_bytes=memory,
        compute=_compute_rate(options, job, given.get("flops", 0.0)),
        host_bytes_per_s=given.get("host-bandwidth") or (sheet.host_bytes_per_s if sheet else 1.0),
        network_bytes_per_s=given.get("network-bandwidth") or (sheet.network_bytes_per_s if sheet else 1.0),
        device="cuda" if sheet else "cpu",
    )


def _compute_rate(options: argparse.Namespace, job: "TrainingJob", peak: float) -> "ComputeRate":
    """Takes the rate from the device's data sheet or from `peak` (0: not given), or measures it on this machine."""
    from dataclasses import replace

    from modelwright.pipeline.estimate.cost import ASSUMED_TRAIN_MFU
    from modelwright.pipeline.estimate.doctor import busy_note, measure_rates
    from modelwright_plan.catalog import DEVICES
    from modelwright_plan.step_time import ComputeRate

    if options.efficiency is not None and not 0.0 < options.efficiency <= 1.0:
        raise ConfigError(f"--efficiency: must be above 0 and at most 1, got {options.efficiency}; 0.4 is 40%")
    sheet = DEVICES[options.device].rate(job.compute, name=options.device) if options.device else None
    if sheet and options.efficiency is None:
        return replace(sheet, peak_flops_per_s=peak or sheet.peak_flops_per_s)
    if sheet or peak:
        share, source = 0.4, "no run on this device is known; give --efficiency"
        peak = peak or (sheet.peak_flops_per_s if sheet else 0.0)
    elif job.compute in ("fp32", "bf16"):
        measured = measure_rates(job.model, num_tokens=min(job.seq_len, 2048), budget_s=2.0)
        busy = busy_note(measured["busy_cores"], remedy="run this again when the machine is quiet, or give --flops")
        peak, share = measured["effective"][job.compute], ASSUMED_TRAIN_MFU
        source = "the peak is that of the model's products as measured here" + (f"; {busy}" if busy else "")
    else:
        raise ConfigError(f"--compute: {job.compute} is not measured on this machine; give --device or --flops")
    if options.efficiency is not None:
        share, source = options.efficiency, "given with --efficiency"
    # One share for all work of a step, that of the memory included.
    return ComputeRate(peak_flops_per_s=peak, product_share=share, attention_share=share, source=source)


COMMAND = Command(
    name="plan",
    run=plan,
    parser=parser,
    summary="plan a parallel layout, the memory of a training step, what a project costs; advice on a training",
)
