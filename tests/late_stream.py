"""A device's module whose stream for copies copies as late as it may: when something waits for it."""

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    """Copies that were started, in order. patience_s: how long the host waits for the device to wait first."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._started: deque[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = deque()
        self.num_started = self.num_done = 0
        self._changed = threading.Condition()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._changed:
            self._started.append((target, weakref.ref(source)))
            self.num_started += 1

    def finish(self, number: int) -> None:
        """Makes the copies up to this number, from values as they are now."""
        with self._changed:
            while self.num_done < number:
                target, source_of = self._started.popleft()
                source = source_of()
                assert source is not None, "a tensor was freed before it was copied"
                target.copy_(source)
                self.num_done += 1
            self._changed.notify_all()

    def finish_late(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_done >= number, timeout=self.patience_s)
        self.finish(number)

    # As a stream of the device
    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: "LateEvent") -> None:
        event.stream.finish(event.number)


class LateEvent:
    stream: LateStream
    number: int

    def record(self, stream: LateStream) -> None:
        self.stream, self.number = stream, stream.num_started

    def synchronize(self) -> None:
        self.stream.finish_late(self.number)


class _Queue(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.stream.start(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


class LateDevice:
    """In place of `torch.cpu`, by `monkeypatch.setattr(torch, "get_device_module", lambda device: LateDevice())`."""

    Event = LateEvent

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self.streams: list[LateStream] = []

    def Stream(self, device: Any) -> LateStream:
        self.streams.append(LateStream(self.patience_s))
        return self.streams[-1]

    def current_stream(self, device: Any) -> LateStream:
        return LateStream(0.0)

    @contextmanager
    def stream(self, stream: LateStream):
        with _Queue(stream):
            yield
