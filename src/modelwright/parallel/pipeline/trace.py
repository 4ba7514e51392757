"""When a rank computes and when it waits: the work of each pipeline stage in a step, by the clock of its device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """Uninterrupted work for one microbatch. kind: forward, loss, backward, backward_input or backward_weight; start_s
    and end_s are relative to the step's start on this rank.
    """

    stage: int
    kind: str
    start_s: float
    end_s: float

    @property
    def busy_s(self) -> float:
        return self.end_s - self.start_s


class StageTimeline:
    """Spans of the newest step. On CUDA, events mark the stream, so nothing waits until `spans` is called."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._began: Any = self._mark()
        self._marks: list[tuple[int, str, Any, Any]] = []

    def begin(self) -> None:
        """Start a new step and discard the spans of the previous one."""
        self._marks = []
        self._began = self._mark()

    def timed(self, work: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        """`work`, recording a span for every call."""

        @wraps(work)
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            start = self._mark()
            result = work(*args, **kwargs)
            self._marks.append((stage, kind, start, self._mark()))
            return result

        return timed_work

    def spans(self) -> list[StageSpan]:
        """Spans in the order in which they ended."""
        if self._uses_events and self._marks:
            self._marks[-1][3].synchronize()
        return [
            StageSpan(stage=stage, kind=kind, start_s=self._since(start), end_s=self._since(end))
            for stage, kind, start, end in self._marks
        ]

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        return self._began.elapsed_time(mark) / 1000 if self._uses_events else mark - self._began
