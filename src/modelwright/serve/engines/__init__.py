"""The engines behind the server: their interface, processes, routing, and the answers in progress."""
