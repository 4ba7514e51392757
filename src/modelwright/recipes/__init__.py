"""Complete named runs, as YAML files."""
