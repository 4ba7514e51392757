"""Complete runs: named ones as YAML files, and the Python interface, which `import modelwright` exports."""
