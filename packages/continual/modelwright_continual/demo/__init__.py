"""`modelwright continual demo`: runs the whole loop on texts of this machine."""
