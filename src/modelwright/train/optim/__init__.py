"""Floor 3: everything between gradient and weight."""
