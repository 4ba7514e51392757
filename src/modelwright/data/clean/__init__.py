"""Cleaning: which documents are kept, and what becomes of them."""
