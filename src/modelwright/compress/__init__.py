"""Number formats of finished weights."""
