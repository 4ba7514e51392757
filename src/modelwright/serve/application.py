"""A server without a socket: the model, its observers, start and shutdown.

`server` runs it with a socket; `examples/deploy/ray_serve.py` runs it behind Ray Serve.
"""

import asyncio
import logging
from dataclasses import replace

from starlette.types import ASGIApp

from modelwright.serve.ab.controller import Experiments
from modelwright.serve.account.metrics import Metrics
from modelwright.serve.account.request_log import RequestLog
from modelwright.serve.account.tracing import Tracing, tracing_to
from modelwright.serve.api.asgi import build_app
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EngineClient
from modelwright.serve.engines.worker import RETRY_AFTER_S
from modelwright.serve.errors import shutting_down
from modelwright.serve.keys import key_ring
from modelwright.serve.load import ModelSource
from modelwright.serve.reload import Locate, Reloader, same_place
from modelwright.serve.served_model import ServedModel, serve_model
from modelwright.serve.service import Service
from modelwright.serve.tokenizer import ServedTokenizer

log = logging.getLogger("modelwright.serve")

NOTHING_KEPT = RequestsConfig()
CUT_OFF_TIMEOUT_S = 2
"""Time for answers that were cut off to send the error to their clients."""


class Application:
    """The server's parts and their lifecycle. All methods but the constructor belong to the event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ServedTokenizer,
        config: ServeConfig,
        *,
        model_name: str,
        requests: RequestsConfig = NOTHING_KEPT,
        source: ModelSource | None = None,
        locate: Locate | None = None,
    ) -> None:
        """client: engines that have not been started; locate: finds the models of reloads, by default in folders.
        Raises `ConfigError` for settings that cannot be used.
        """
        # settings are checked before a database is opened
        config.check_names(model_name)
        keys = key_ring(config)
        self.metrics = Metrics(model_name)
        served = serve_model(client, tokenizer, config, self.metrics, source)
        self.service = Service(config, model_name, served, self.metrics, keys)
        self.reloader = Reloader(self.service, locate or same_place(source), self._load)
        self.tracing: Tracing | None = None
        if requests.traces:
            self.tracing = tracing_to(requests.traces, log_prompts=config.log_prompts)
        self._request_log = RequestLog(requests, self.metrics) if requests.log else None
        self._experiments: Experiments | None = None
        if requests.ab_state:
            self._experiments = Experiments(self.service, self.reloader, requests.ab_state)

    def asgi(self) -> ASGIApp:
        """Returns the routes. Call it after `start`."""
        return build_app(self.service, self.reloader, self._experiments, self.tracing)

    async def start(self) -> None:
        """Starts the engines and observers. Call it inside the running event loop, before requests arrive."""
        self.service.worker.start()
        self.service.metrics.versions.show(self.service.model.fingerprint)
        if self._request_log:
            self._request_log.start()
            self.service.observers.append(self._request_log)
        if self._experiments:
            # resumes a test, so it needs the running worker above
            await self._experiments.start()
            self.service.observers.append(self._experiments)
        if self.tracing:
            self.service.observers.append(self.tracing)

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        self.service.is_draining = True
        if self.service.arms is not None:
            self.service.arms.request_arrived()  # aborts a copy of a request, which is not worth waiting for

    def cut_off(self) -> None:
        """Ends all running answers with an error."""
        self.begin_drain()
        for worker in self.service.workers:
            worker.abort_all(shutting_down("The server is shutting down.", RETRY_AFTER_S))

    async def finish_answers(self) -> None:
        """Waits for running answers up to `drain_timeout_s`, and cuts off the rest."""
        if not await self._wait_idle(self.service.config.drain_timeout_s):
            log.warning("running answers were cut off after %gs", self.service.config.drain_timeout_s)
            self.cut_off()
            await self._wait_idle(CUT_OFF_TIMEOUT_S)

    async def close(self) -> None:
        """Stops the engines and writes all queued records."""
        # observers last, because the ends of answers are reported to them
        await self.reloader.close()
        await self.service.worker.stop()
        if self._experiments:
            await self._experiments.close()
        if self._request_log:
            await asyncio.to_thread(self._request_log.close)
        if self.tracing:
            await self.tracing.close()

    async def _wait_idle(self, timeout_s: float) -> bool:
        return all(await asyncio.gather(*(worker.wait_idle(timeout_s) for worker in self.service.workers)))

    def _load(self, source: ModelSource, metrics: Metrics) -> ServedModel:
        """Loads a version with the adapters of the current one."""
        adapters = {name: str(adapter.folder) for name, adapter in self.service.model.adapters.items()}
        config = replace(self.service.config, adapters=adapters)
        client, tokenizer = load_engines(source, config)
        return serve_model(client, tokenizer, config, metrics, source)
