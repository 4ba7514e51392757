"""Floor 6: chains stages into a run, skips finished ones, resumes interrupted ones, writes the report."""
