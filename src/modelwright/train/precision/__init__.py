"""Floor 3: number formats during training."""
