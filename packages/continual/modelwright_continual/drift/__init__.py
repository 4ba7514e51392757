"""The drift monitor: `freeze_reference` (`reference.py`) records requests at a model's release, and `check`
(`check.py`) tests whether later requests still follow the same distribution.
"""
