"""What a run leaves on disk, and reading it back: checkpoints, weights, logs, responses, the workdir."""
