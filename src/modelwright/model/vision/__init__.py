"""Vision towers, and the text towers of CLIP and SigLIP folders."""
