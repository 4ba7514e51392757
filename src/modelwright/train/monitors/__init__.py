"""Monitors: they look at finished steps and report; they change nothing about the training."""
