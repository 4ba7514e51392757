"""Vision towers, and models that read images."""
