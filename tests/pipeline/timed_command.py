"""`timed_command.py SECONDS ARGUMENTS...` is `modelwright ARGUMENTS...`, to whose `--minutes` every step of training
seems to take SECONDS, on any machine.
"""

import sys

import pytest

from modelwright.cli.main import main
from modelwright.pipeline.estimate.time_budget import Timed

if __name__ == "__main__":
    step_s, *words = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timed, "observe", lambda timed, info: timed.seconds.append(float(step_s)))
        sys.exit(main(words))
