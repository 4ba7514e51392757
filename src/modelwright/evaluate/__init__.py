"""Evaluation of a model on documents, without runs, stages or servers."""
