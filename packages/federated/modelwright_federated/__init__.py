"""Federated fine-tuning on Flower. Importing this package first disables the usage reports that Flower and Ray, which
runs the clients of a simulation, would otherwise send to their makers.
"""

import os
import sys

# Flower reads the variable when it is imported; `check_flower` reports the case that this comes too late.
if "flwr" not in sys.modules:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
