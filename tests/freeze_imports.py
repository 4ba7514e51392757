"""Imported last by the server from which processes are forked: garbage collections then skip what it has imported."""

import gc

gc.collect()
gc.freeze()
