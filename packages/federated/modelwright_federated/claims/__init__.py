"""Claims of the ledger about this package; `modelwright prove` finds them by the entry points `modelwright.claims`."""
