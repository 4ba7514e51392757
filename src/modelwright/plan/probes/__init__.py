"""Micro-measurements of the machine around the processor's products: memory, disk, network, accelerator."""
