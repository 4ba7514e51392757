"""A local page from raw text to a monitored model. It computes nothing: each button starts a command line of
`modelwright` as a process, and each state is read from a run's folder or a server's route.
"""
