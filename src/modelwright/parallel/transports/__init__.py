"""Gradient transports other than the exact one: see `parallel/transport.py` for the seam, `build.py` for the choice."""
