"""The layer loop: micro-batches in flight, decisions, submission, statistics of a step."""
