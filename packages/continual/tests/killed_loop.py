"""`modelwright ...`, which dies by SIGKILL just before or just after something appears on disk.

KILL_AT: what the path of the artifact or file has to match; KILL_WHEN: `before` or `after`.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from modelwright.cli.main import main
from modelwright.core import artifacts
from modelwright_continual import drift_trigger, loop, self_replay
from plain_runs import plain_runs

PATTERN, WHEN = os.environ["KILL_AT"], os.environ["KILL_WHEN"]


def deadly(publish: Callable[..., None], place: int) -> Callable[..., None]:
    """place: of the argument with the final path."""

    def publish_or_die(*arguments: object) -> None:
        path = arguments[place]
        is_it = isinstance(path, Path) and bool(re.search(PATTERN, str(path)))
        if is_it and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*arguments)
        if is_it and WHEN == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    return publish_or_die


artifacts._replace_folder = deadly(artifacts._replace_folder, 1)
drift_trigger.write_atomic = deadly(drift_trigger.write_atomic, 0)
loop.write_atomic = deadly(loop.write_atomic, 0)
self_replay.write_atomic = deadly(self_replay.write_atomic, 0)
with plain_runs():
    sys.exit(main(sys.argv[1:]))
