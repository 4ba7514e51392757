"""Floor 3: what happens between gradient and weight. Knows no model, no rank, no loss."""
