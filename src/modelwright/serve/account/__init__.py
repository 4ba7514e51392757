"""What the server keeps of its requests and reports of them: log, metrics, spans."""
