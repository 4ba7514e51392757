"""Floor 5: evaluation of a model on documents, without runs, stages or servers."""
