"""Floor 3: number formats of finished weights."""
