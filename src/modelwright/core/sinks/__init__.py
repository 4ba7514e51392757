"""Destinations of a training's numbers besides `metrics.jsonl`: TensorBoard and experiment trackers."""
