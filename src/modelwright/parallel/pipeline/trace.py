"""Timeline of each pipeline stage's work in a step, by the clock of its device: when a rank computes and waits."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """Uninterrupted work for one microbatch. kind: `forward`, `loss`, `backward`, `backward_input` or
    `backward_weight`; start_s and end_s are relative to the step's start on this rank.
    """

    stage: int
    kind: str
    start_s: float
    end_s: float

    @property
    def busy_s(self) -> float:
        return self.end_s - self.start_s


class StageTimeline:
    """Records the spans of the newest step. On CUDA, events mark the stream, so nothing waits before `spans`."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._began: Any = self._mark()
        self._marks: list[tuple[int, str, Any, Any]] = []

    def begin(self) -> None:
        """Starts a new step and discards the spans of the previous one."""
        self._marks = []
        self._began = self._mark()

    def timed(self, work: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        """Wraps `work` so that every call records a span."""

        @wraps(work)
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            start = self._mark()
            result = work(*args, **kwargs)
            self._marks.append((stage, kind, start, self._mark()))
            return result

        return timed_work

    def spans(self) -> list[StageSpan]:
        """Returns the spans in the order in which they ended."""
        # Events complete in the order of the stream: the last end stands for all before it.
        if self._uses_events and self._marks:
            self._marks[-1][3].synchronize()
        spans = []
        for stage, kind, *marks in self._marks:
            start_s, end_s = (
                self._began.elapsed_time(mark) / 1000 if self._uses_events else mark - self._began for mark in marks
            )
            spans.append(StageSpan(stage=stage, kind=kind, start_s=start_s, end_s=end_s))
        return spans

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
