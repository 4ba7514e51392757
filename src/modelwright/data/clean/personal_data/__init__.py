"""Detection of personal data and secrets: a table of patterns by kind; the step privacy replaces what they match."""
