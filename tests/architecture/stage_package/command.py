"""`modelwright ...` where the package in this folder is installed."""

import sys

from modelwright.cli.main import main

sys.exit(main(sys.argv[1:]))
