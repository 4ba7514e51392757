"""A/B tests of two versions of the model in one server: who gets which, what is measured, when the new one goes."""
