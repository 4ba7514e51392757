"""Gradient synchronization in fewer bytes: quantized, sparsified, low-rank."""
