"""The forms of a model for other programs, one file each; `formats` lists them."""
