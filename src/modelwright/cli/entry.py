"""Entry point of the process `modelwright`: before it imports anything else, Ctrl-C ends it without a traceback.

`cli.main` installs its own handlers as soon as it is imported.
"""

import signal
import sys


def main() -> int:
    """Run the command line of this process."""
    # A handler that the parent process chose stays: nohup ignores the signal, for example.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from modelwright.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
