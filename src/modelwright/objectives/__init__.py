"""Floor 5: what is learned, one file each. Knows no step, no rank's gradients, no checkpoint."""
