"""Floor 1: pure tensor functions, each fast one next to its naive reference, and measured rates of the machine."""
