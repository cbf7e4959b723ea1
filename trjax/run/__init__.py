"""A run around the step: start, loop, evaluation, checkpoints, records. It may use `step` and what `step` may use."""
