"""Floor 6: chains stages into a run, skips what is done, goes on with what was cut off, writes the report."""
