"""Pure tensor functions, each fast one next to its naive reference, and measured rates of the machine."""
