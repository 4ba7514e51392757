"""What tests of scheduled updates share: a clock that nobody waits for, and a stand-in for the loop."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.artifacts import RunDir
from modelwright.core.progress import SilentProgress
from modelwright_continual import schedule
from modelwright_continual.drift_trigger import DriftTrigger
from modelwright_continual.loop import LoopRequest, LoopResult
from modelwright_continual.schedule import UpdateSchedule, UpdateScheduler
from modelwright_continual.update import UpdateRequest

DAY_S = 86_400.0


@dataclass
class Clock:
    """Time that passes by sleeping alone."""

    now: float = 1_000_000.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Loops:
    """Stands in for the loop, which has tests of its own: what it is asked, and how it ends."""

    endings: list[Any]
    asked: list[LoopRequest] = field(default_factory=list)

    def __call__(self, request: LoopRequest, **more: Any) -> LoopResult:
        self.asked.append(request)
        ending = self.endings.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        return ending if isinstance(ending, LoopResult) else LoopResult(ending=ending, text="")

    def texts(self, number: int) -> list[str]:
        return [json.loads(line)["text"] for line in Path(self.asked[number].update.new[0]).read_text().splitlines()]


Scheduled = Callable[..., tuple[UpdateScheduler, Loops, Clock]]


def scheduler_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduled:
    """Makes a scheduler in `folder/plan` on the texts of `folder/new.jsonl`, whose loops end as it is told."""

    def make(
        *endings: Any, clock: Clock | None = None, drift: DriftTrigger | None = None, **config: Any
    ) -> tuple[UpdateScheduler, Loops, Clock]:
        loops, clock = Loops(list(endings)), clock or Clock()
        monkeypatch.setattr(schedule, "run_loop", loops)
        monkeypatch.setattr(schedule, "_NAP_S", DAY_S)
        update = UpdateRequest(model=folder / "model", new=(str(folder / "new.jsonl"),), replay=0.0)
        request = LoopRequest(update=update, benchmark=folder / "bench", run=RunDir(folder / "plan"), drift=drift)
        settings = UpdateSchedule(**{"every_s": DAY_S, "checks": len(endings), **config})
        made = UpdateScheduler(
            request=request,
            config=settings,
            words=[],
            progress=SilentProgress(),
            clock=lambda: clock.now,
            sleep=clock.sleep,
        )
        return made, loops, clock

    return make


def write_texts(folder: Path, *texts: str) -> None:
    (folder / "new.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
