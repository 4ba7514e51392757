"""Detection of personal data and secrets: a table of patterns by kind, whose matches the step privacy replaces."""
