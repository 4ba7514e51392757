"""One file for each training technique; `train/build.py` lists them in order."""
