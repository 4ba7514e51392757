"""Floor 4: the inference engine. Token ids in, token ids out, without text or network."""
