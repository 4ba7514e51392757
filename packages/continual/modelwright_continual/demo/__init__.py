"""`modelwright continual demo`: the whole loop on texts of this machine."""
