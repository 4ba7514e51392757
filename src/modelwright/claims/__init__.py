"""Floor 8: published claims and what we measure of them, one module each. Knows no command line."""
