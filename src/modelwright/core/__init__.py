"""The lowest layer: configuration, run directory, artifacts, records, seeds, errors."""
