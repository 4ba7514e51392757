"""Floor 5: numbers for people and gates. Knows a model, a tokenizer and documents; knows no run, stage or server."""
