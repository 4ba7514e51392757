"""Rule-based rewards: a number for each answer to a prompt, computed by rules, a user's function or executed code."""
