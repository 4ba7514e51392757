"""Floor 5: what is learned, one file each."""
