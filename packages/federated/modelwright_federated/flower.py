"""Requirements on the Flower installation, and the form of Flower's messages.

Weights travel as one array in the form of `GlobalWeights`, under the names that Flower's strategies look for.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import numpy as np

from modelwright.core.config import ConfigError, ModelwrightError

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

TELEMETRY, INSTALLATION = "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
INSTALLS = "--allow-runtime-dependency-installation"
"""Option that Flower passes to the process of an app for which it has installed packages."""
REMEDY = "pip install 'modelwright[federated]'"
SUPPORTED = "1.42."
"""Required minor version: Flower changes the interfaces that this package builds on from one minor version
to the next."""

WEIGHTS, ARRAYS, CONFIG, METRICS, CLIENT = "weights", "arrays", "config", "metrics", "client"
"""Names of the weight array and of the records of a message."""
NUM_LABELS = "num-examples"
"""Weight of an update, under the name by which Flower's strategies look for it."""
SETTINGS = "settings"
"""Digest of the server's settings, which is sent to clients along with Flower's `server-round`."""


def check_flower() -> None:
    """Raises `ConfigError` if Flower is missing, has another version, reports to its makers or installs packages."""
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(f"federated: Flower (flwr) is not installed; {REMEDY}") from None
    if not installed.startswith(SUPPORTED):
        raise ConfigError(f"federated: Flower {installed} is installed, and {SUPPORTED}x is needed; {REMEDY}")
    if TELEMETRY not in os.environ:  # Flower read it when it was imported, before this package could set it
        raise ConfigError(
            f"{TELEMETRY}: is not set, so that Flower reports what runs to its makers; "
            f"export {TELEMETRY}=0 where you start Flower, or 1 if you want that"
        )
    if INSTALLS in sys.argv:
        raise ConfigError(
            f"{INSTALLS}: Flower installs the packages that an app names, on this machine; export {INSTALLATION}=1 "
            "where you start flower-superlink, and start flower-supernode without this option"
        )


def array_record(weights: np.ndarray) -> "ArrayRecord":
    """Wraps weights [N] in the form that Flower sends."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({WEIGHTS: Array(weights)})


def weights_of(arrays: "ArrayRecord") -> np.ndarray:
    """Returns the weights [N, float64] of a message. Raises `ModelwrightError` for other arrays."""
    try:
        (array,) = arrays.values()
        weights = array.numpy()
        if weights.ndim != 1 or weights.dtype.kind != "f":
            raise ValueError(f"{weights.dtype} {weights.shape}")
    except Exception as error:  # the bytes come from somebody else; numpy has many errors for them
        raise ModelwrightError(f"federated: a message must hold one vector of weights ({error})") from None
    return weights.astype(np.float64)
