"""Floor 7: what keeps a served model up to date: it watches the requests that the model answers."""
