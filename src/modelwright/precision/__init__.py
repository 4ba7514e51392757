"""Floor 3: number formats while training."""
