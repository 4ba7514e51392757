"""`modelwright manifests`: files by which Docker Compose, Kubernetes or Ray Serve runs the server of a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.overrides import split_settings
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serving import (
    MODEL_OPTIONS,
    add_model_options,
    read_serving,
    setting_names,
    settings_help,
    show_remark,
)
from modelwright.core.errors import ConfigError
from modelwright.core.quantities import parse_quantity

_OWN = (*MODEL_OPTIONS, "for", "out", "replicas", "cpus", "memory", "image", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "manifests",
        "Write the files by which Docker Compose, Kubernetes or Ray Serve runs the server of a model, and print the "
        "commands that follow. Settings of the server are given as to `modelwright serve`; files and variables with "
        "secrets are only named.",
        notes=settings_help(),
        example="modelwright manifests runs/quickstart --for kubernetes --out deploy --replicas 3",
        usage="modelwright manifests RUN|MODEL_FOLDER --for compose|kubernetes|ray --out DIR [--replicas N] [--cpus N] "
        "[--memory SIZE] [--image NAME] [--stage NAME] [--int8] [--adapters NAME=FOLDER ...] [--a.b VALUE ...]",
    )
    add_model_options(parser)
    parser.add_argument(
        "--for", dest="kind", required=True, metavar="compose|kubernetes|ray", help="what runs the server"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the files")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="servers (default: 1)")
    parser.add_argument("--cpus", type=int, default=0, metavar="N", help="cores of each (default: 2 for each engine)")
    parser.add_argument(
        "--memory",
        default="",
        metavar="SIZE",
        help="of each server, such as 4GiB (default: an estimate with room for a second version)",
    )
    parser.add_argument("--image", default="", metavar="NAME", help="of the container (default: NAME:VERSION)")
    return parser


def manifests(words: Sequence[str]) -> int:
    """`modelwright manifests`"""
    leading, own, rest = split_settings(words, _OWN)
    parsed = parser().parse_args([*leading, *own])
    from modelwright.serve.manifests.deployment import Needs, deployment_of
    from modelwright.serve.manifests.kinds import KINDS, write_manifests

    if parsed.kind not in KINDS:
        raise ConfigError(f"--for: {parsed.kind!r} is unknown; choose from {', '.join(KINDS)}")
    needs = Needs(replicas=parsed.replicas, cpus=parsed.cpus, memory_bytes=_memory(parsed.memory), image=parsed.image)
    serving = read_serving(parsed, rest, _OWN)
    show_remark(serving.remark)
    deployment = deployment_of(
        serving.source, serving.settings, serving.requests, model_name=serving.model_name, needs=needs
    )
    steps = write_manifests(deployment, parsed.kind, parsed.out)
    print("\n".join(["Written. Next:", *(f"  {step}" for step in steps)]))
    return 0


def _memory(word: str) -> int:
    """Bytes; 0 for an estimate. Raises `ConfigError`."""
    quantity = parse_quantity(word) if word else None
    if word and (quantity is None or quantity.unit not in ("", "b") or quantity.value < 1):
        raise ConfigError(f"--memory: {word!r} is no size; write 4GiB")
    return int(quantity.value) if quantity else 0


COMMAND = Command(
    name="manifests",
    run=manifests,
    parser=parser,
    settings=setting_names,
    summary="write files by which Docker Compose, Kubernetes or Ray Serve runs a server",
)
