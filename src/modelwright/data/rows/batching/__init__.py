"""The order of rows, and their combination into batches."""
