"""The report: one self-contained HTML page on what happened in a run."""
