"""Floor 5: what the machine can do and what a run will cost, before it starts. Runs no stage and trains nothing."""
