"""Junk that a classifier tells from trusted text."""
