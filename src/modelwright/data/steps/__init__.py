"""Cleaning steps, one file each: a generator of documents that says why it drops one."""
