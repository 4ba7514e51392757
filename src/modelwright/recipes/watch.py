"""What a caller sees of long work: nothing, the display of the command line, or each step of training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from modelwright.core.progress import Progress, SilentProgress


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One logged step of a training. loss: nats per token, or the objective's own; mfu: model FLOPs utilization."""

    stage: str
    step: int
    num_steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    mfu: float


OnStep = Callable[[TrainingStep], bool | None]
"""Takes each step; `False` stops the training after it, with a checkpoint from which the same call goes on."""


class WatchedProgress:
    """Passes all progress on, and each step of training to `on_step`."""

    def __init__(self, progress: Progress, on_step: OnStep | None) -> None:
        self.has_stopped = False
        self._progress, self._on_step = progress, on_step
        self._stage, self._total = "", 0

    def begin(self, name: str, total: float, unit: str) -> None:
        self._stage, self._total = name, int(total)
        self._progress.begin(name, total, unit)

    def advance(self, done: float, **fields: float | str) -> None:
        self._progress.advance(done, **fields)
        if self._on_step is None or "lr" not in fields:  # only training has a learning rate
            return
        step = TrainingStep(
            stage=self._stage,
            step=int(done),
            num_steps=self._total,
            loss=float(fields["loss"]),
            learning_rate=float(fields["lr"]),
            tokens_per_s=float(fields["tokens_per_s"]),
            mfu=float(fields["mfu"]),
        )
        if self._on_step(step) is False:
            from modelwright.train.interruption import StopRequest

            self.has_stopped = True
            StopRequest.ask()

    def note(self, text: str) -> None:
        self._progress.note(text)

    def end(self) -> None:
        self._progress.end()


@contextmanager
def shown(progress: "bool | Progress") -> Iterator[Progress]:
    """The progress that a caller asked for: none, the display on the error stream, or the caller's own."""
    if progress is True:
        from modelwright.recipes.display import shown_progress

        with shown_progress() as display:
            yield display
    else:
        yield progress or SilentProgress()
