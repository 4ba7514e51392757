"""Published rules of thumb, evaluated for a training: a dated table, and one evaluator for each row."""
