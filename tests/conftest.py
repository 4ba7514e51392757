"""What all tests share.

Processes that they start hear Ctrl-C, also where the tests run in the background. What was imported is left out of
garbage collections: a training run begins with one, which would take 0.2 s each time.
"""

import gc
import signal

import pytest

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
