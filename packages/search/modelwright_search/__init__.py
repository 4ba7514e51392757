"""Search for a model's shape, or for hyperparameters, under budgets of latency, parameters and training cost."""
