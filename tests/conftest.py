"""What all tests share: processes that they start hear Ctrl-C, also where the tests run in the background."""

import gc
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt everything that is imported by now from garbage collection.

    Every training run ends with a full collection, which otherwise visits about a million objects of modules.
    """
    gc.collect()
    gc.freeze()
