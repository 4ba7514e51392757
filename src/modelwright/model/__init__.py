"""One decoder on a single device."""
