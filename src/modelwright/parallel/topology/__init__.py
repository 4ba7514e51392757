"""Collectives and rank mapping that follow the measured links between hosts."""
