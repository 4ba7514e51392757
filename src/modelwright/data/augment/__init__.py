"""Text augmentation: changed copies of training documents. `methods.py` lists the methods, one file each."""
