"""Ranks, collectives and gradient synchronization."""
