"""Detection of personal data and secrets: a table of patterns by kind; the stage privacy replaces what they match."""
