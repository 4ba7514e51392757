"""Modelwright: from raw text to a served, monitored language model, with every technique measured."""

import os
import sys

from modelwright.core.library_environment import prepare

__version__ = "0.1.0"

prepare(os.environ, is_too_late="torch" in sys.modules)
