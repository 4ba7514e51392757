"""TensorBoard's event files, in the folder `tensorboard` of a stage. Every training writes them."""

from collections.abc import Mapping
from typing import Any

from modelwright.core.sinks.sink import SinkSpec, SinkStart


class TensorBoardSink:
    """Writes one event for all numbers of a step: `SummaryWriter`'s one for each takes ten times as long."""

    def __init__(self, start: SinkStart) -> None:
        from tensorboardX import FileWriter  # pyright: ignore[reportMissingTypeStubs]
        from tensorboardX.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingTypeStubs]

        events: Any = event_pb2
        self._messages: Any = summary_pb2
        self._writer: Any = FileWriter(str(start.folder / "tensorboard"), flush_secs=20)
        # The purge event: TensorBoard ignores what older files have of this step and later ones.
        purge = events.Event(session_log=events.SessionLog(status=events.SessionLog.START))
        self._writer.add_event(purge, start.first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self._messages.Summary.Value(tag=name, simple_value=one) for name, one in values.items()]
        self._writer.add_summary(self._messages.Summary(value=numbers), step)

    def close(self) -> None:
        self._writer.close()


TENSORBOARD = SinkSpec(name="tensorboard", open=TensorBoardSink)
