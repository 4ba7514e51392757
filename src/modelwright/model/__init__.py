"""Floor 2: one decoder on a single device. Knows no rank, no cache, no loss."""
