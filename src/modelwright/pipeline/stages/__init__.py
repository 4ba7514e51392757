"""One module per stage: the settings and parents on which it depends, and its work."""
