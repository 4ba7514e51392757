"""Packed rows in three tiers: memory that the processes of a host share, a local disk, and wherever the rows lie."""
