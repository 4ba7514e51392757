"""Floor 0: configuration, run directory, artifacts, records, seeds, errors."""
