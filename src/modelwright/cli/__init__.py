"""Floor 8: the command line. Parsing, dispatch and what the terminal shows; no logic."""
