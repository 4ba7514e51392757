"""Strategies by which ranks share gradients and updates, one file each; `parallel/strategy.py` has the protocol."""
