"""Floor 3: what happens between gradient and weight."""
