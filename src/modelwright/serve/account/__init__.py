"""Accounts of requests: the request log, metrics, spans and the server's own log."""
