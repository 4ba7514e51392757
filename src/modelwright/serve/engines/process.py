"""An engine in a separate process, `python -m modelwright.serve.engines.process FD`, and the gateway's side of it.

FD is its end of a Unix socket. The first message that it reads is an `EngineSetup`, the first that it sends an
`EngineReport` or an error. Then it sends one message per step: new tokens, load and refusals. Without work it sends one
every `HEARTBEAT_S`, from the same loop, so that a process whose engine hangs falls silent. It ends when the gateway
closes the socket or exits. Messages are JSON objects, one per line.
"""

import asyncio
import contextlib
import functools
import gc
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import torch

from modelwright.compress.int8 import Backend, Int8Linear, Int8WeightsConfig
from modelwright.core.config import ConfigError, ModelError, ModelwrightError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.products import HeadKind, fastest_head_kind, head_of
from modelwright.model.adapter_bank import PreparedAdapter, load_adapters, prepare_adapter
from modelwright.model.decoder import Decoder
from modelwright.serve.engines.client import EngineEnd, EngineInfo, engine_info, job_of, output_message
from modelwright.serve.engines.grammars import GrammarCompiler
from modelwright.serve.errors import ApiError, log
from modelwright.serve.load import ServedTokenizer, load_folder, weights_fingerprint

HEARTBEAT_S = 0.25
SETUP_TIMEOUT_S = 60.0

SMALL_MODEL_PARAMETERS = 50_000_000
"""Size below which an engine leaves a core to the gateway, whose work for a token then takes about as long as the
engine's. Measured on two cores with 8.6M parameters: an engine in a thread of the server sustained 160 requests of 8
tokens a second at a 99th percentile of 150 ms with one thread, and fewer than 80 with two. The limit itself was not
measured."""

RECEIVE_BYTES = 1 << 20


START_TIMEOUT_S = 600.0
"""Time for loading the model and measuring the fastest kernels."""
SILENCE_S = 2.5
"""Time without a message, ten heartbeats, after which an engine counts as hung ..."""
SILENCE_STEPS = 10.0
"""... or this many of its longest steps, if that takes longer."""

WATCH_PERIOD_S = 0.1
EXIT_TIMEOUT_S = 5.0


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@dataclass
class LineDecoder:
    """Assembles messages from the parts in which they arrive."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the messages that `data` completes."""
        self._rest += data
        if b"\n" not in data:  # a large message arrives in many parts, and must not be searched again with each
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [json.loads(line) for line in lines]


class BlockingChannel:
    """One end of the connection, for a process or thread that may block."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = LineDecoder()
        self._poll = select.poll()  # select.select takes no descriptor above 1023
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `OSError` if the other side is gone."""
        self.connection.sendall(encode(message))

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """Receives one message, which no other may follow. Raises `TimeoutError`, and like `receive`."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self.receive(left_s):
                return message
        raise TimeoutError

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Waits up to `timeout_s` and returns the complete messages. Raises `EOFError` if the peer is gone."""
        if not self._poll.poll(1000 * timeout_s):
            return []
        data = self.connection.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return self._decoder.feed(data)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The settings of an engine process. `heads`: candidates for the output head, of which the process measures the
    fastest; `int8_backend`: "auto" to choose one. Several engines must use the same ones to give the same bits.
    """

    folder: str
    engine: Mapping[str, Any]
    """Fields of an `EngineConfig`."""
    num_threads: int
    heads: tuple[HeadKind, ...]
    int8_backend: Backend | str
    may_spare_thread: bool = False
    """True to leave one thread to the gateway if the model is small."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders of adapters by their names in jobs."""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """The model and kernels of an engine process. Batch-invariant engines with equal reports give the same bits."""

    info: EngineInfo
    is_batch_invariant: bool
    row_multiple: int
    head: HeadKind
    int8_backend: Backend | str
    decodes_by_operator: bool = False


@dataclass
class EngineHandle:
    """A process whose engine is ready. `full_step_s`: seconds of a step with the most prompt tokens."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    report: EngineReport
    full_step_s: float

    @classmethod
    def launch(
        cls, setup: EngineSetup, on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None
    ) -> Self:
        """Starts a process and waits until its engine is ready. on_start: called with the process before the wait, so
        that another thread can end it. Raises `ModelError` if the engine does not become ready, `ConfigError` if a
        setting is the reason.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "modelwright.serve.engines.process", str(theirs.fileno())]
        # Our copy of the other end is closed at once, so that the end of the process closes the connection. The process
        # gets a new session, so that Ctrl-C reaches only the gateway, which drains first.
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        on_start(process)
        try:
            channel = BlockingChannel(ours)
            channel.send(asdict(setup))
            message = channel.receive_one(START_TIMEOUT_S)
            if "failed" in message:
                raise (ConfigError if message["is_setting"] else ModelError)(message["failed"])
        except BaseException as error:
            _end(process, ours)
            if not isinstance(error, (EOFError, OSError)):  # TimeoutError is an OSError
                raise
            what = f"within {START_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else "at all; see its messages"
            raise ModelError(f"{setup.folder}: an engine process did not start {what}") from None
        fields = message["report"]
        report = EngineReport(**{**fields, "info": EngineInfo(**fields["info"])})
        return cls(process, ours, report, message["full_step_s"])

    def end(self) -> None:
        """Waits for the process to end after its socket is closed, and kills it if it does not."""
        _end(self.process, self.connection)


def relaunch(
    setup: EngineSetup, expected: Callable[[], EngineReport], on_start: Callable[[subprocess.Popen[bytes]], None]
) -> EngineHandle | None:
    """Starts a process that replaces a lost one. Returns None, with the reason in the log, if it cannot be started or
    if its report differs. expected: report of the other engines, which may change meanwhile.
    """
    try:
        handle = EngineHandle.launch(setup, on_start)
    except ModelwrightError as error:
        log.error("an engine could not be started again: %s", error)
        return None
    except Exception:  # an exception would end the task that restarts this engine
        log.exception("an engine could not be started again")
        return None
    if handle.report != expected():
        text = "an engine was started again with %s instead of %s: the files have changed; reload the model"
        log.error(text, handle.report, expected())
        handle.end()
        return None
    return handle


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_TIMEOUT_S)
        return
    process.kill()
    process.wait()


class EngineLink(asyncio.Protocol):
    """The connection to a ready engine inside the event loop."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self._receive = receive
        self._decoder = LineDecoder()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport
        self._heard_at = self._loop.time()
        self._ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        for message in self._decoder.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or drops it if the engine is gone: `watch` ends next, and its answers move."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        self._transport.abort()

    async def watch(self, silence_s: float) -> EngineEnd:
        """Waits until the engine has died or has been silent for `silence_s`, and returns which."""
        while not self._ended.is_set():
            before = self._loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WATCH_PERIOD_S)
            now = self._loop.time()
            # time in which this loop was blocked does not count, because it could not receive anything
            self._heard_at += max(0.0, now - before - WATCH_PERIOD_S)
            if now - self._heard_at > silence_s:
                return "wedged"
        return "died"


@dataclass
class AdapterLoader:
    """Loads and unloads adapters for the gateway (`EnginePool`), between two steps of the engine. Files are read in a
    thread, so that the engine continues meanwhile.
    """

    _engine: Engine
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _reading: "dict[int, tuple[str, Future[PreparedAdapter]]]" = field(default_factory=dict)
    _replies: list[list[Any]] = field(default_factory=list)

    def begin(self, number: int, name: str, folder: str) -> None:
        """Starts to load the adapter in a folder, or with folder "" unloads it."""
        if folder:
            future = self._threads.submit(prepare_adapter, self._engine.model, Path(folder))
            self._reading[number] = (name, future)
            return
        if name in self._engine.adapters.names:
            self._engine.remove_adapter(name)
        self._replies.append([number, True, ""])

    def replies(self) -> list[list[Any]]:
        """Returns, for all calls that finished since the last time, the number, whether it is done, and the digest of
        the adapter's values or the reason of a failure.
        """
        for number, (name, future) in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[number]
            try:
                adapter = future.result()
                self._engine.add_adapter(name, adapter)
                self._replies.append([number, True, adapter.digest])
            except ModelwrightError as error:
                self._replies.append([number, False, str(error)])
            except Exception as error:  # an unexpected file must not end the engine and all its answers
                log.exception("the adapter %s could not be loaded", name)
                self._replies.append([number, False, f"{type(error).__name__}: {error}"])
        replies, self._replies = self._replies, []
        return replies


def run(channel: BlockingChannel, engine: Engine, tokenizer: ServedTokenizer) -> None:
    """Serves the gateway until it closes the socket."""
    grammars = GrammarCompiler(tokenizer.definition, engine.vocab_size, tokenizer.stop_ids)
    adapters = AdapterLoader(engine)
    while True:
        # status, text and code by request
        refused: dict[str, list[Any]] = {}
        for message in channel.receive(0.0 if engine.has_work else HEARTBEAT_S):
            compile_once = functools.cache(grammars.compile_now)  # the answers of one request share its grammar
            for request_id, plain in message.get("add", {}).items():
                try:
                    job_of(plain, compile_once).submit(engine, request_id)
                except ApiError as error:
                    refused[request_id] = [error.status, error.message, error.code]
                except ValueError as error:
                    refused[request_id] = [400, str(error), "invalid_value"]
            for request_id in message.get("abort", []):
                engine.abort(request_id)
            for number, name, folder in message.get("adapters", []):
                adapters.begin(number, name, folder)
        outputs = [output_message(output) for output in engine.step()]
        report = {"outputs": outputs, "stats": asdict(engine.stats()), "refused": refused}
        channel.send(report | {"adapters": adapters.replies()})


def full_step_s(engine: Engine) -> float:
    """Measures a step with the most prompt tokens, in seconds."""
    # the second of two counts, because the first one warms up
    length = min(engine.config.max_num_batched_tokens, engine.config.prefill_chunk_size, engine.max_seq_len - 1)
    elapsed_s = 0.0
    for name in ("warm-up", "measured"):
        engine.embed(name, [0] * length, cache_salt=name)
        started = time.monotonic()
        while engine.has_work:
            engine.step()
        elapsed_s = time.monotonic() - started
    return elapsed_s * max(1, engine.config.max_num_batched_tokens // length)


def threads_for(model: Decoder, setup: EngineSetup) -> int:
    """Returns the number of threads of the engine."""
    # from the size of the model, not from a measurement: the last bits of answers may depend on the number, and answers
    # have to be the same after a restart
    is_small = model.config.num_parameters < SMALL_MODEL_PARAMETERS
    return max(1, setup.num_threads - (setup.may_spare_thread and is_small))


def load(setup: EngineSetup) -> tuple[Engine, ServedTokenizer, EngineReport]:
    """Loads the model and creates its engine. Raises `ModelwrightError` if the folder cannot be loaded."""
    torch.set_num_threads(setup.num_threads)
    model, tokenizer = load_folder(Path(setup.folder), Int8WeightsConfig(backend=setup.int8_backend))  # type: ignore[arg-type]
    torch.set_num_threads(threads_for(model, setup))
    # after the number of threads is set, on which the fastest head depends
    head = setup.heads[0] if len(setup.heads) == 1 else fastest_head_kind(model)
    adapters = load_adapters(model, {name: Path(folder) for name, folder in setup.adapters.items()})
    engine = Engine(model, EngineConfig(**setup.engine), head=head_of(model, head), adapters=adapters)
    backends = {module.backend for module in model.modules() if isinstance(module, Int8Linear)}
    report = EngineReport(
        info=engine_info(engine, weights_fingerprint(model)),
        is_batch_invariant=engine.is_batch_invariant,
        row_multiple=engine.row_multiple,
        head=head,
        int8_backend=backends.pop() if backends else setup.int8_backend,
        decodes_by_operator=not engine.why_no_operator,
    )
    return engine, tokenizer, report


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        channel = BlockingChannel(connection)
        with contextlib.suppress(EOFError, ConnectionError):  # the gateway is gone
            message = channel.receive_one(SETUP_TIMEOUT_S)
            try:
                engine, tokenizer, report = load(EngineSetup(**{**message, "heads": tuple(message["heads"])}))
            except ModelwrightError as error:
                channel.send({"failed": str(error), "is_setting": isinstance(error, ConfigError)})
                return
            channel.send({"report": asdict(report), "full_step_s": full_step_s(engine)})
            gc.collect()
            gc.freeze()  # collections block all answers, and most objects of this point stay alive
            run(channel, engine, tokenizer)


if __name__ == "__main__":
    main()
