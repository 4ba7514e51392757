"""Floor 3: number formats while training. Knows no rank, no optimizer, no step."""
