"""Floor 7: complete named runs. A recipe is a function that returns a frozen config."""
