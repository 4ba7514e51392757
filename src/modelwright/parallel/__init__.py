"""Floor 3: ranks, collectives and how gradients travel. Knows no optimizer and no loss."""
