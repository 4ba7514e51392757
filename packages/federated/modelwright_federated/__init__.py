"""Federated fine-tuning on Flower, which reports what runs to its makers unless this is set before it is imported; Ray,
which runs the clients of a simulation, does so, too.
"""

import os
import sys

if "flwr" not in sys.modules:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
