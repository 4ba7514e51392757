"""A server of the Model Context Protocol over a folder of runs."""
