"""A local page for the whole way from raw text to a monitored model. It computes nothing: each button is a command line
of `modelwright` in a process of its own, and each state is read from a run's folder or a server's route.
"""
