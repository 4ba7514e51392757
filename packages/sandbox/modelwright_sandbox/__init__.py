"""Runs untrusted Python code without network and without other files than its own, within limits on time, memory,
processes and output.
"""
