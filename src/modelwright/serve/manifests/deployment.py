"""What is deployed, whatever places it: the server's command line, its model, secrets and needs of a machine."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelwright.compress.int8 import is_int8_folder
from modelwright.core.config import dump, flatten
from modelwright.core.errors import ConfigError
from modelwright.model.hf import load_config
from modelwright.serve.config import OWN_BACKEND, ServeConfig
from modelwright.serve.database import FROM_ENVIRONMENT
from modelwright.serve.engines import backend_of
from modelwright.serve.load import SHORT_DIGEST, ModelSource
from modelwright.serve.requests_config import RequestsConfig
from modelwright.serve.tracing import check_collector

HEADER = "# Written by `modelwright manifests`; write it again rather than edit it.\n"
"""A line of every file, by which one is known that may be replaced."""

PORT = 8000
"""In the container, whatever the port outside."""

PROCESS_BYTES = 768 * 2**20
"""Memory of a process with PyTorch and no model (about 500 MiB), and of requests besides the cache."""

FP32_BYTES = 4
VERSIONS_AT_ONCE = 2
"""A reload has the old and the new version in memory."""

CLOSE_MARGIN_S = 10.0
"""What the server takes after `drain_timeout_s` to cut off answers, export spans and end its engines."""

MODEL_PATH = "/model"
ADAPTERS_PATH = "/adapters"
SECRETS_PATH = "/etc/modelwright"
"""Nothing else mounts anything there."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
MOST_NAME_CHARACTERS = 40
"""Kubernetes allows 63, and names of objects have endings."""


@dataclass(frozen=True)
class SecretFile:
    """A file that no image may have. setting: the server's setting that names it; name: in the container."""

    setting: str
    name: str
    source: Path

    @property
    def target(self) -> str:
        return f"{SECRETS_PATH}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What is asked of the machines. replicas: servers; cpus: cores of each; memory_bytes: of each, 0 for an estimate;
    image: its name, "" for one after the model's version.
    """

    replicas: int = 1
    cpus: int = 0
    memory_bytes: int = 0
    image: str = ""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas: must be at least 1, got {self.replicas}")
        if self.cpus < 0:
            raise ConfigError(f"--cpus: must be at least 1, got {self.cpus}")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A server in containers. name: of objects, in letters, digits and hyphens; arguments: of `modelwright serve` after
    the model; folders: what images contain besides the package, by their paths there; environment: variables with
    secrets; extras: of the package.
    """

    name: str
    model_name: str
    image: str
    config: ServeConfig
    requests: RequestsConfig
    arguments: Sequence[str]
    folders: Mapping[str, Path]
    secret_files: Sequence[SecretFile]
    environment: Sequence[str]
    extras: Sequence[str]
    needs: Needs
    version: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.config.tls_certificate else "http"

    @property
    def grace_s(self) -> float:
        """From the signal to stop until the process may be killed."""
        return self.config.drain_timeout_s + CLOSE_MARGIN_S

    @property
    def variables(self) -> dict[str, str]:
        """The environment that is no secret: a container sees all cores of its machine, and may use fewer."""
        return {"OMP_NUM_THREADS": str(self.needs.cpus), "HOME": "/tmp"}


def deployment_of(
    source: ModelSource, config: ServeConfig, requests: RequestsConfig, *, model_name: str, needs: Needs
) -> Deployment:
    """Raises `ConfigError` for settings that need something that a container does not keep."""
    config.check_names(model_name)
    name = _NOT_IN_NAMES.sub("-", model_name.lower()).strip("-")[:MOST_NAME_CHARACTERS].strip("-")
    if not name or not name[0].isalpha():
        name = f"model-{name}".strip("-")
    paths = adapter_paths(config)
    folders = {MODEL_PATH: source.folder.resolve()}
    folders |= {paths[one]: Path(path).resolve() for one, path in config.adapters.items()}
    for one, path in config.adapters.items():
        if not Path(path).is_dir():
            raise ConfigError(f"--adapters: {one}={path}: no such folder")
    secret_files = list(_secret_files(config))
    words = list(_words(config, {secret.setting: secret.target for secret in secret_files}))
    adapters = [f"{one}={path}" for one, path in paths.items()]
    words += ["--adapters", *adapters] if adapters else []
    words += list(_request_words(requests))
    words += [f"--backend={config.backend}"] if config.backend != OWN_BACKEND else []
    back_end = backend_of(config)
    if back_end.needs_gpu:
        text = f"{config.backend} needs a GPU, and these containers have none; run modelwright serve where one is"
        raise ConfigError(f"--backend: {text}, or deploy another back-end")
    wanted = {
        "structured": True,
        **({back_end.extra: True} if back_end.extra else {}),
        "otel": bool(requests.traces),
        "requests-log": bool(requests.log),
    }
    cpus = needs.cpus or 2 * config.engines
    memory_bytes = needs.memory_bytes or estimated_bytes(source.folder, config)
    digest = source.digest[:SHORT_DIGEST] or "latest"
    return Deployment(
        name=name,
        model_name=model_name,
        image=needs.image or f"{name}:{digest}",
        config=config,
        requests=requests,
        arguments=["--served-model-name", model_name, *words],
        folders=folders,
        secret_files=secret_files,
        environment=list(_variables_with_secrets(config, requests)),
        extras=[name for name, is_wanted in wanted.items() if is_wanted],
        needs=Needs(replicas=needs.replicas, cpus=cpus, memory_bytes=memory_bytes, image=needs.image),
        version=source.digest[:SHORT_DIGEST],
    )


def adapter_paths(config: ServeConfig) -> dict[str, str]:
    """Where the adapters are in the container, by name. Paths are numbered, because names are any texts."""
    return {name: f"{ADAPTERS_PATH}/{number}" for number, name in enumerate(config.adapters, start=1)}


def estimated_bytes(folder: Path, config: ServeConfig) -> int:
    """Memory of a server: weights and caches of all engines, those of a new version beside them, and the processes."""
    model = load_config(folder)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not is_int8_folder(folder):
        weights = FP32_BYTES * model.num_parameters
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * FP32_BYTES
    engine = weights + per_token * config.engine.kv_cache_tokens
    return VERSIONS_AT_ONCE * config.engines * engine + (1 + VERSIONS_AT_ONCE * config.engines) * PROCESS_BYTES


def _secret_files(config: ServeConfig) -> Iterator[SecretFile]:
    """Raises `ConfigError` for one that does not exist."""
    for setting, name in {"keys_file": "keys.yaml", "tls_certificate": "tls.crt", "tls_key": "tls.key"}.items():
        path = getattr(config, setting)
        if path:
            if not Path(path).is_file():
                raise ConfigError(f"{setting}: {path}: no such file")
            yield SecretFile(setting, name, Path(path).resolve())


def _words(config: ServeConfig, paths: Mapping[str, str]) -> Iterator[str]:
    """The settings that are not the defaults, as options. paths: of secrets in the container, by their settings."""
    elsewhere = {"host": "0.0.0.0", "port": PORT, **paths}  # who may connect is for the platform to decide
    usual = dict(flatten(dump(ServeConfig())))
    for name, value in flatten({**dump(config), **elsewhere}):
        if name in elsewhere or value != usual[name]:
            if isinstance(value, list):
                yield from (f"--{name}", *map(str, value))
            else:
                yield f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def _variables_with_secrets(config: ServeConfig, requests: RequestsConfig) -> Iterator[str]:
    """Their names. Raises `ConfigError` for what no shell takes as one."""
    names = {"api_key_env": config.api_key_env} if config.api_key_env else {}
    names |= {"requests.log": requests.log.removeprefix(FROM_ENVIRONMENT)} if requests.log else {}
    for setting, name in names.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{setting}: {name!r} is no name of an environment variable; write one such as MY_KEY")
        yield name


def _request_words(requests: RequestsConfig) -> Iterator[str]:
    if requests.ab_state:
        raise ConfigError(
            "requests.ab_state: tests are kept in a file, which containers that come and go do not keep; leave it out"
        )
    if requests.traces:
        check_collector(requests.traces)
    if requests.log and not requests.log.startswith(FROM_ENVIRONMENT):
        raise ConfigError(
            "requests.log: a file in a container is lost with it; name an environment variable with a database's URL "
            "(env:LOG_URL)"
        )
    usual = dump(RequestsConfig())
    yield from (f"--requests.{name}={value}" for name, value in dump(requests).items() if value != usual[name])
