"""What agents need of an answer: calls of functions in the form of the model's template, and thoughts."""
