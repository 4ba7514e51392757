"""A/B tests of two versions of the model in one server: assignment, measures, and withdrawal of a worse version."""
