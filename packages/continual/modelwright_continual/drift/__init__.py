"""The drift monitor: `freeze_reference` (`reference.py`) keeps what requests looked like when a model was released, and
`check` (`check.py`) says whether later requests still look like that.
"""
