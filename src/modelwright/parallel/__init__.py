"""Floor 3: ranks, collectives and how gradients travel."""
