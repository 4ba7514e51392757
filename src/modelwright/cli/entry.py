"""Where the process of `modelwright` begins: before anything else is imported, Ctrl-C ends it without a traceback.

`cli.main` installs its own handlers as soon as it is imported.
"""

import signal
import sys


def main() -> int:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored, as nohup asks for
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from modelwright.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
