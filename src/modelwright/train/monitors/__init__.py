"""Monitors observe finished steps and report; they do not affect training."""
