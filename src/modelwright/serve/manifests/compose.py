"""A file for Docker Compose: one server on one machine."""

import os
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.serve.manifests.deployment import PORT, Deployment
from modelwright.serve.manifests.image import USER_ID, contexts

START_S = 600
"""For loading a model and measuring what is fastest, as in `engine_handle`."""


def compose_file(deployment: Deployment) -> dict[str, Any]:
    """Raises `ConfigError` for several servers, which could not share the port."""
    if deployment.needs.replicas > 1:
        raise ConfigError("--replicas: Compose runs one server on one machine; take --engines, or kubernetes")
    config = deployment.config
    limits = {"cpus": str(deployment.needs.cpus), "memory": str(deployment.needs.memory_bytes)}
    service = {
        "image": _escaped(deployment.image),
        "build": {
            "context": ".",
            "dockerfile": "Dockerfile",
            "additional_contexts": {name: _escaped(str(path)) for name, path in contexts(deployment).items()},
        },
        "command": list(map(_escaped, deployment.arguments)),
        "environment": deployment.variables | {name: f"${{{name}:?set {name}}}" for name in deployment.environment},
        "ports": [{"target": PORT, "published": str(config.port or PORT), "host_ip": config.host, "protocol": "tcp"}],
        "user": _user(),
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{deployment.grace_s:g}s",
        "healthcheck": {
            "test": ["CMD", "python", "-c", _probe(deployment)],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{START_S}s",
        },
        "deploy": {"resources": {"limits": limits, "reservations": {"memory": limits["memory"]}}},
    }
    secrets = {secret.name: {"file": _escaped(str(secret.source))} for secret in deployment.secret_files}
    if secrets:
        service["secrets"] = [{"source": secret.name, "target": secret.target} for secret in deployment.secret_files]
    file = {"name": deployment.name, "services": {"modelwright": service}}
    return file | ({"secrets": secrets} if secrets else {})


def _escaped(word: str) -> str:
    """Compose replaces variables in all values."""
    return word.replace("$", "$$")


def _user() -> str:
    """Compose mounts secrets with the owner and mode that they have here, so who may read them runs the server."""
    number = os.getuid()
    return f"{number}:{os.getgid()}" if number else f"{USER_ID}:{USER_ID}"


def _probe(deployment: Deployment) -> str:
    """A program that fails unless the server takes requests."""
    address = f"{deployment.scheme}://127.0.0.1:{PORT}/readyz"
    trust = ", context=ssl._create_unverified_context()" if deployment.scheme == "https" else ""
    return f"import ssl, urllib.request as u; u.urlopen('{address}', timeout=4{trust})"
