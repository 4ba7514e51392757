"""What all tests share: processes that they start hear Ctrl-C, also where the tests run in the background."""

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
