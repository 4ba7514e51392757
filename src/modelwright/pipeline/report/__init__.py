"""The report: one self-contained HTML page that says what happened in a run."""
