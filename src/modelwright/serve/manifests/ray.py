"""A config for Ray Serve: one application whose replicas are servers."""

from typing import Any

from modelwright.core.config import difference, dump
from modelwright.core.errors import ConfigError
from modelwright.serve.config import OWN_BACKEND, ServeConfig
from modelwright.serve.manifests.deployment import MODEL_PATH, PORT, Deployment, adapter_paths
from modelwright.serve.ray_app import DEPLOYMENT, build
from modelwright.serve.requests_config import RequestsConfig

IMPORT_PATH = f"{build.__module__}:{build.__name__}"


def ray_config(deployment: Deployment) -> dict[str, Any]:
    """Raises `ConfigError` for settings of sockets, which belong to Ray's proxies."""
    config = deployment.config
    if config.tls_certificate:
        raise ConfigError("tls_certificate: Ray's proxies serve plain HTTP; put a proxy with HTTPS before them")
    settings = difference(dump(config), dump(ServeConfig()))
    for name in ("host", "port", "adapters"):
        settings.pop(name, None)
    arguments = {
        "folder": str(deployment.folders[MODEL_PATH]),
        "model_name": deployment.model_name,
        "adapters": {name: str(deployment.folders[path]) for name, path in adapter_paths(config).items()},
        "backend": config.backend if config.backend != OWN_BACKEND else "",
        "settings": settings,
        "requests": difference(dump(deployment.requests), dump(RequestsConfig())),
    }
    replicas = {
        "name": DEPLOYMENT,
        "num_replicas": deployment.needs.replicas,
        "ray_actor_options": {"num_cpus": deployment.needs.cpus, "memory": deployment.needs.memory_bytes},
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port or PORT},
        "applications": [
            {
                "name": deployment.name,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {name: value for name, value in arguments.items() if value},
                "deployments": [replicas],
            }
        ],
    }
