"""The list of systems that manifests are written for, and how they are written."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError
from modelwright.serve.manifests.compose import compose_file
from modelwright.serve.manifests.deployment import HEADER, Deployment
from modelwright.serve.manifests.image import build_command, contexts, dockerfile
from modelwright.serve.manifests.kubernetes import kubernetes_objects, secret_command
from modelwright.serve.manifests.ray import ray_config


@dataclass(frozen=True)
class ManifestKind:
    """A system that runs servers. files: contents by file name; steps: commands for a person, in the folder of them."""

    files: Callable[[Deployment], Mapping[str, str]]
    steps: Callable[[Deployment], Sequence[str]]


def _yaml(*documents: Any) -> str:
    return HEADER + yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


def _compose_files(deployment: Deployment) -> dict[str, str]:
    return {"Dockerfile": dockerfile(deployment), "compose.yaml": _yaml(compose_file(deployment))}


def _compose_steps(deployment: Deployment) -> list[str]:
    return ["docker compose up --build --detach --wait"]


def _kubernetes_files(deployment: Deployment) -> dict[str, str]:
    return {"Dockerfile": dockerfile(deployment), "kubernetes.yaml": _yaml(*kubernetes_objects(deployment))}


def _kubernetes_steps(deployment: Deployment) -> list[str]:
    secret = secret_command(deployment)
    build = build_command(deployment.image, contexts(deployment))
    return [
        build,
        f"docker push {shlex.quote(deployment.image)}",
        *([secret] if secret else []),
        "kubectl apply -f kubernetes.yaml",
    ]


def _ray_files(deployment: Deployment) -> dict[str, str]:
    return {"serve.yaml": _yaml(ray_config(deployment))}


def _ray_steps(deployment: Deployment) -> list[str]:
    return ["serve deploy serve.yaml"]


KINDS: Mapping[str, ManifestKind] = {
    "compose": ManifestKind(_compose_files, _compose_steps),
    "kubernetes": ManifestKind(_kubernetes_files, _kubernetes_steps),
    "ray": ManifestKind(_ray_files, _ray_steps),
}
"""The only list."""


def write_manifests(deployment: Deployment, kind: str, folder: Path) -> list[str]:
    """Write a kind's files into a folder, over those that were written before; returns the next steps. Raises
    `ConfigError` where the deployment needs what the kind does not have, before anything is written.
    """
    files = KINDS[kind].files(deployment)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: {folder} is a file; name a folder")
    for name in files:
        path = folder / name
        if path.is_file() and HEADER not in path.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(f"--out: {path} was not written by this command; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [f"cd {shlex.quote(str(folder))}", *KINDS[kind].steps(deployment)]
