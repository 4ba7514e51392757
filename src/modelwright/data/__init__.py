"""Floor 1: text to documents to tokens to resumable batches."""
