"""Documents as packed rows of tokens, and their batches."""
