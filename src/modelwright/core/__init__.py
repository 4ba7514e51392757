"""Floor 0: configuration, run directory, artifacts, records, seeds, errors. Knows nothing about tensors."""
