"""Objects for Kubernetes: a Deployment of servers, the Service before them, and a budget of disruptions."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from modelwright.serve.manifests.deployment import PORT, SECRETS_PATH, Deployment
from modelwright.serve.manifests.image import USER_ID

PRE_STOP_S = 5
"""Kubernetes takes a pod out of its Services while it stops it; until that is known everywhere, requests still come."""

START_PERIOD_S = 2
START_TRIES = 300
"""Together the ten minutes that an engine may take to start."""


def kubernetes_objects(deployment: Deployment) -> list[dict[str, Any]]:
    objects = [_deployment(deployment), _service(deployment)]
    return [*objects, _budget(deployment)] if deployment.needs.replicas > 1 else objects


def secret_command(deployment: Deployment) -> str:
    """Makes the Secret that the objects name; its contents are in no manifest. "" if there is none."""
    files = [shlex.quote(f"--from-file={secret.name}={secret.source}") for secret in deployment.secret_files]
    variables = [f'--from-literal={name}="${name}"' for name in deployment.environment]
    if not files and not variables:
        return ""
    return " ".join(["kubectl create secret generic", deployment.name, *files, *variables])


def _deployment(deployment: Deployment) -> dict[str, Any]:
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(deployment.grace_s) + PRE_STOP_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(deployment)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if deployment.secret_files:
        items = [{"key": secret.name, "path": secret.name} for secret in deployment.secret_files]
        secret = {"secretName": deployment.name, "defaultMode": 0o440, "items": items}
        pod["volumes"].append({"name": "secrets", "secret": secret})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment),
        "spec": {
            "replicas": deployment.needs.replicas,
            "selector": {"matchLabels": _selected(deployment)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": _labels(deployment)}, "spec": pod},
        },
    }


def _container(deployment: Deployment) -> dict[str, Any]:
    quantities = {"cpu": str(deployment.needs.cpus), "memory": str(deployment.needs.memory_bytes)}
    from_secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": deployment.name, "key": name}}}
        for name in deployment.environment
    ]
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    if deployment.secret_files:
        mounts.append({"name": "secrets", "mountPath": SECRETS_PATH, "readOnly": True})  # type: ignore[dict-item]
    return {
        "name": "modelwright",
        "image": deployment.image,
        "args": [word.replace("$", "$$") for word in deployment.arguments],  # $(NAME) is a variable, and $$ one $
        "env": [*({"name": name, "value": value} for name, value in deployment.variables.items()), *from_secret],
        "ports": [{"name": "api", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": _probe(deployment, "/livez", period_s=START_PERIOD_S, tries=START_TRIES),
        "livenessProbe": _probe(deployment, "/livez", period_s=10, tries=3),
        "readinessProbe": _probe(deployment, "/readyz", period_s=2, tries=2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "resources": {"requests": quantities, "limits": dict(quantities)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _probe(deployment: Deployment, path: str, *, period_s: int, tries: int) -> dict[str, Any]:
    get = {"path": path, "port": "api", "scheme": deployment.scheme.upper()}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": tries}


def _service(deployment: Deployment) -> dict[str, Any]:
    port = 443 if deployment.scheme == "https" else 80
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment),
        "spec": {
            "type": "ClusterIP",
            "selector": _selected(deployment),
            "ports": [{"name": deployment.scheme, "port": port, "targetPort": "api", "protocol": "TCP"}],
        },
    }


def _budget(deployment: Deployment) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _selected(deployment)}},
    }


def _metadata(deployment: Deployment) -> dict[str, Any]:
    return {"name": deployment.name, "labels": _labels(deployment)}


def _selected(deployment: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "modelwright", "app.kubernetes.io/instance": deployment.name}


def _labels(deployment: Deployment) -> Mapping[str, str]:
    version = {"app.kubernetes.io/version": deployment.version} if deployment.version else {}
    return _selected(deployment) | version
