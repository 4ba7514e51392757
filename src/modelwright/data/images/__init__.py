"""Images with captions: decoding, sources, storage. Cleaning them is `data/clean/steps/images.py`."""
