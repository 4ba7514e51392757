"""The gate: whether an updated model may take the place of the one in service."""
