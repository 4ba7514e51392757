"""The only package that uses HTTP: an OpenAI-compatible server, its chat page, and chat in the terminal."""
