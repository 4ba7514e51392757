"""Number formats during training."""
