"""The source tree that this package is run from: containers and rented machines install the package from it.

The name `modelwright` on PyPI belongs to another project, so no file that is written here installs a package by that
name.
"""

import sys
from pathlib import Path

from modelwright.core.errors import ConfigError

CHECKOUT_FILES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")
"""Files that an installation needs in addition to `src`."""
PINNED_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python for which the versions in constraints.txt are known to exist."""


def source_checkout(setting: str) -> Path:
    """Returns the root of the source tree. setting: option that needs it, for the error. Raises `ConfigError` if this
    package was installed without the tree.
    """
    root = Path(__file__).resolve().parents[3]
    missing = [name for name in CHECKOUT_FILES if not (root / name).is_file()]
    if missing:
        raise ConfigError(
            f"{setting}: needs the source tree of this package, and {root} lacks {missing[0]}; run the command from a "
            "checkout in which the package is installed with pip install -e ."
        )
    return root
