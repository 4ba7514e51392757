"""The request and feedback log: what was asked and answered, without personal data, for monitoring and training."""
