"""Ray Serve places servers on the machines of a cluster: each replica is a whole server with its engines, and Ray's
proxies pass requests to them. `ray_serve.yaml` is the config of such an application.

Needs the extra `ray-serve` where an application is built or runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from modelwright.core.config import ConfigError, parse
from modelwright.serve.config import OWN_BACKEND, RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import Application

if TYPE_CHECKING:
    from ray.serve import Application as RayApplication

DEPLOYMENT = "modelwright"
OF_RAY = ("host", "port", "tls_certificate", "tls_key")
"""Settings of the sockets, which belong to Ray's proxies."""


@dataclass(frozen=True, kw_only=True)
class RayArguments:
    """The arguments of the application in Ray's config. Paths have to exist on every machine."""

    folder: str
    """The model's."""
    model_name: str
    """What clients call it."""
    stage: str = ""
    digest: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    """Folders by name."""
    backend: str = OWN_BACKEND
    """As `modelwright serve` takes it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `serve` that are not the defaults."""
    requests: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `requests` that are not the defaults."""

    @property
    def config(self) -> ServeConfig:
        """Raises `ConfigError`."""
        for name in OF_RAY:
            if name in self.settings:
                raise ConfigError(f"{name}: sockets belong to Ray's proxies; set http_options of its config instead")
        return replace(parse(ServeConfig, self.settings), adapters=dict(self.adapters), backend=self.backend)


class RayServer:
    """The ASGI application of one replica."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._routes: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._routes is not None, "requests come after the startup"
        await self._routes(scope, receive, send)

    def require_healthy(self) -> None:
        """Raises `RuntimeError` when only another replica helps."""
        state = self._application.service.state
        if state.name == "broken":
            raise RuntimeError(state.reason)

    def add_exception_handler(self, kind: Any, handler: Any) -> None:
        """Some versions of Ray hand over handlers for errors of calls to other deployments, which are never made."""

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._application.start()
                self._routes = self._application.asgi()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self._application.begin_drain()
                await self._application.finish_answers()
                await self._application.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


def server_of(arguments: RayArguments) -> RayServer:
    """Load the model. Raises `ModelError` and `ConfigError`."""
    source = ModelSource(
        name=arguments.model_name, folder=Path(arguments.folder), stage=arguments.stage, digest=arguments.digest
    )
    requests = parse(RequestsConfig, arguments.requests, "requests")
    client, tokenizer = load_engines(source, arguments.config)
    try:
        application = Application(
            client, tokenizer, arguments.config, model_name=arguments.model_name, requests=requests, source=source
        )
    except BaseException:
        client.discard()  # no engine may outlive a server that was never built
        raise
    return RayServer(application)


def build(args: Mapping[str, Any]) -> "RayApplication":
    """Build the application that `import_path` of Ray's config names. args: the fields of `RayArguments`. How many
    replicas there are, and with how many cores, is for the config's `deployments` to say. Raises `ConfigError` for
    other arguments, and without the extra.
    """
    arguments = parse(RayArguments, dict(args), "args")
    config = arguments.config  # raises here rather than in every replica
    try:
        from ray import serve
    except ImportError as error:
        text = f"Ray Serve needs a package that is not installed ({error.name})"
        raise ConfigError(f"{text}; pip install 'modelwright[ray-serve]'") from None

    def make_app() -> ASGIApp:
        return server_of(arguments)

    class RayIngress:
        """Ray asks it whether it is well; requests go to the ASGI application."""

        app: RayServer

        def check_health(self) -> None:
            self.app.require_healthy()

    deploy: Callable[[Any], Any] = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=config.max_queued + config.engines * config.engine.max_num_seqs,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 10,
    )
    return deploy(serve.ingress(make_app)(RayIngress)).bind()
