"""Memory between forward and backward: activation checkpointing, offloading, the tensor heap, traces of a step."""
