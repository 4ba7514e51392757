"""Floor 4: the inference engine. Token ids in, token ids out; knows no text and no network."""
