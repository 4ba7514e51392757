"""`python -m modelwright.core.print_environment`: the variables of `core.library_environment`, as `env` takes them."""

import os
import sys

from modelwright.core.library_environment import COMPILED, WAIT_POLICIES, lowered

if __name__ == "__main__":
    architecture = lowered()
    names = (*((*architecture.variables, COMPILED) if architecture else ()), *WAIT_POLICIES)
    sys.stdout.write(" ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) + "\n")
