"""The engines behind the server: their interface, processes, grammars and back-ends."""
