"""Exact and near-duplicates of documents."""
