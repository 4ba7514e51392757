"""Plans before a training runs: parallel layouts, memory of a step, cost, spot instances, energy, and advice."""
