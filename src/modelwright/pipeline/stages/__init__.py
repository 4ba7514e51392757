"""One module per stage: which settings and parents it depends on, and what it does with them."""
