"""Continual learning for a served model: drift monitoring of requests, updates, the gate, A/B tests and promotion."""
