"""Where the numbers of a training go beside `metrics.jsonl`: TensorBoard and experiment trackers."""
