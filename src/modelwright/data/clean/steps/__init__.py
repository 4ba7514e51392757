"""The steps of cleaning, one file each, and the protocols that they follow (`step.py`)."""
