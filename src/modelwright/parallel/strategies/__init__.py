"""How ranks share gradients and updates, one file for each strategy; `parallel/strategy.py` has the protocol."""
