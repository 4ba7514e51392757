"""Published claims about training techniques, and what we measure of them: one module each."""
