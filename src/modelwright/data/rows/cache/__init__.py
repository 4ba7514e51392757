"""Packed rows and images in three tiers: memory that the processes of a host share, a disk, and the source."""
