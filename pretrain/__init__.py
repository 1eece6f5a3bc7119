"""Training: run configuration, DeepSpeed engine, loop, checkpoints and metrics."""
