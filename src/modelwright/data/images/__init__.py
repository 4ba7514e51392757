"""Images with captions: decoding, sources, storage. Cleaning them is `data/steps/images.py`."""
