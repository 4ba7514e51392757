"""Formats of models for other programs, one file each; `formats` lists them."""
