"""The inference engine: token ids in, token ids out, without text or network."""
