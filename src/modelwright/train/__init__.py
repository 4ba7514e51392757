"""Floor 4: THE loop: step, accumulate, resume, checkpoint, metrics. Never sees a loss formula."""
