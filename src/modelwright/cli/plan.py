"""`modelwright plan`: which layout for a model on these hosts, how much memory it takes, how long a step lasts."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli import plan_memory
from modelwright.core.errors import ConfigError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?) ?([kmgt]i?|)(?:b|flop)?(?:/s)?", re.IGNORECASE)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modelwright plan",
        description="Propose layouts for training a model on some hosts, the fastest first, and say why others do not "
        "fit. TARGET: a recipe, a YAML file, a run directory, or a well-known size (gpt3-175b, llama2-7b).",
        epilog="Sizes and rates take units: 80GB, 64GiB, 900M. Without --device the rates of this machine's own "
        "products are measured, and the links' rates must be given where there is more than one device.",
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus-per-host", type=int, default=1, help="devices (on CPUs: processes) of a host")
    parser.add_argument("--device", choices=("h100", "a100", "v100"), help="take memory and rates from its data sheet")
    parser.add_argument(
        "--memory", metavar="BYTES", help="memory of one device; without BYTES, the timeline of a step's memory"
    )
    parser.add_argument("--flops", metavar="PER_S", help="peak FLOP/s of one device")
    parser.add_argument("--host-bandwidth", metavar="BYTES_PER_S", help="of one device to the others in its host")
    parser.add_argument("--network-bandwidth", metavar="BYTES_PER_S", help="of one device to other hosts")
    parser.add_argument("--batch-tokens", type=int, help="tokens of an update (default: the recipe's, else 4M)")
    parser.add_argument("--seq-len", type=int, help="tokens of a row (default: the recipe's, else the model's context)")
    parser.add_argument("--compute", choices=("fp32", "bf16"), help="(default: the recipe's, else bf16)")
    parser.add_argument("--top", type=int, default=8, help="layouts to show")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="measured errors are read here"
    )
    plan_memory.add_options(parser)
    return parser


def plan(words: Sequence[str]) -> int:
    """`modelwright plan`"""
    options = parser().parse_args(plan_memory.spelled(words, lambda word: _NUMBER.fullmatch(word) is not None))
    if options.timeline:
        return plan_memory.show(options, number)
    for name in ("hosts", "gpus-per-host"):
        if (given := getattr(options, name.replace("-", "_"))) < 1:
            raise ConfigError(f"--{name}: must be at least 1, got {given}")
    from modelwright.claims.results import read_results
    from modelwright.plan.proposal_text import known_error, proposal_data, proposal_text
    from modelwright.plan.search import propose

    job = _job(options)
    cluster = _cluster(options, job)
    proposal = propose(job, cluster)
    if options.json:
        print(json.dumps(proposal_data(job, cluster, proposal), indent=1))
        return 0
    error = known_error(read_results(options.results)) if options.results.is_dir() else ""
    print(proposal_text(job, cluster, proposal, top=options.top, known_error=error))
    return 0


def number(text: str, name: str) -> float:
    """`80GB`, `64GiB`, `9e14`, `900M` as a number. Raises `ConfigError` for anything else."""
    matched = _NUMBER.fullmatch(text.strip())
    if matched is None or float(matched[1]) <= 0:
        raise ConfigError(f"{name}: {text!r} is no size above 0; write 80GB, 64GiB or 8e10")
    return float(matched[1]) * _UNITS[matched[2].lower()]


def _job(options: argparse.Namespace):
    from modelwright.plan.catalog import MODELS
    from modelwright.plan.layout import Job

    if options.target in MODELS:
        model, seq_len, batch_tokens, compute = MODELS[options.target], 0, 2**22, "bf16"
    else:
        from modelwright.pipeline.resolve import settle_model
        from modelwright.recipes.load import load

        config = settle_model(load(options.target, {}).config)
        model, seq_len, batch_tokens = config.model, config.pack.seq_len, config.pretrain.batch_tokens
        compute = "fp32" if config.pretrain.precision.policy in ("fp32", "int8", "fastest") else "bf16"
    seq_len = plan_memory.row_len(options.seq_len, seq_len or model.max_seq_len, longest=model.max_seq_len)
    batch_tokens = batch_tokens if options.batch_tokens is None else options.batch_tokens
    if batch_tokens < 1 or batch_tokens % seq_len:
        given = f", got {batch_tokens}" if options.batch_tokens is not None else f"; {batch_tokens} is none"
        raise ConfigError(f"--batch-tokens: must be a multiple of a row's {seq_len} tokens{given}")
    return Job(
        model=model,
        seq_len=seq_len,
        batch_tokens=batch_tokens,
        compute=options.compute or compute,
    )


def _cluster(options: argparse.Namespace, job):
    from modelwright.core.resources import hardware
    from modelwright.plan.catalog import DEVICES
    from modelwright.plan.doctor import measure_rates
    from modelwright.plan.traffic import Cluster

    sheet = DEVICES.get(options.device)
    given = {
        name: number(value, f"--{name}")
        for name in ("memory", "flops", "host-bandwidth", "network-bandwidth")
        if (value := getattr(options, name.replace("-", "_")))
    }
    alone = options.hosts * options.gpus_per_host == 1
    if sheet is None and not alone and not {"host-bandwidth", "network-bandwidth"} <= given.keys():
        raise ConfigError("--host-bandwidth: give it and --network-bandwidth, or --device with a data sheet")
    if sheet is None and "flops" not in given:
        rates = measure_rates(job.model, num_tokens=min(job.seq_len, 2048), budget_s=2.0)["effective"]
        given["flops"] = rates[job.compute]
    memory = given.get("memory") or (
        sheet.memory_bytes if sheet else hardware()["memory_bytes"] / options.gpus_per_host
    )
    return Cluster(
        num_hosts=options.hosts,
        devices_per_host=options.gpus_per_host,
        memory_bytes=memory,
        flops_per_s=given.get("flops") or (sheet.flops_per_s if sheet else 0.0),
        host_bytes_per_s=given.get("host-bandwidth") or (sheet.host_bytes_per_s if sheet else 1.0),
        network_bytes_per_s=given.get("network-bandwidth") or (sheet.network_bytes_per_s if sheet else 1.0),
        device="cuda" if sheet else "cpu",
    )
