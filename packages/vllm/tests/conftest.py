"""The server's own fixtures, and this folder's helpers as modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from serve.conftest import one_thread  # noqa: F401  (autouse)
