"""Floor 3: what stays in memory between forward and backward."""
