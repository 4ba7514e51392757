"""The lowest layer: configuration, run directory, artifacts, records, seeds, errors."""

VERSION = "0.2.0"
"""Of the package; here, because importing `modelwright` for it would be an import upwards."""
