"""Floor 2: one decoder on a single device."""
