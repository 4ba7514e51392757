"""The gate, which decides whether an updated model may replace the one in service."""
