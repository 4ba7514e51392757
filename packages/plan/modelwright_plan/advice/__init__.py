"""What a training needs of a machine, what limits it there, and which techniques and published rules help."""
