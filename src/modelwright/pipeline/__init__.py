"""Chains stages into a run, skips finished ones, resumes interrupted ones, writes the report."""
