"""Floor 9: the command line. Parsing, dispatch and what the terminal shows; no logic."""
