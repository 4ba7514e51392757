"""Floor 7: complete named runs, as YAML files."""
