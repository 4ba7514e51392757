"""Towers that read images, and the text towers that CLIP and SigLIP folders have beside them."""
