"""Floor 5: the only place that knows HTTP. An OpenAI-compatible server, its chat page, and chat in the terminal."""
