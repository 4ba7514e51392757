"""Which rows come next, and how they are combined into batches."""
