"""Floor 8: complete named runs, as YAML files."""
