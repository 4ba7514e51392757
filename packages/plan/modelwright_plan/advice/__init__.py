"""Advice on a training: its needs of a machine, the resource that limits it, and the techniques and rules that help."""
