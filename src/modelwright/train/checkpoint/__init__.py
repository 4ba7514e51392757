"""Checkpoints of a run: writing, reading, sharded tensors, copies in host memory."""
