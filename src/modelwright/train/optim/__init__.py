"""Everything between gradient and weight."""
