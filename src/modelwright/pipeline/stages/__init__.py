"""One module per stage: the settings and parents it depends on, and what it does with them."""
