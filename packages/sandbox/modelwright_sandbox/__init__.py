"""Runs Python code that nobody has read: no network, no files but its own, bounded time, memory, processes, output."""
