"""Floor 3: ranks, collectives and gradient synchronization."""
