"""Floor 1: pure tensor functions, each fast one beside its naive twin, and measured rates of the machine."""
