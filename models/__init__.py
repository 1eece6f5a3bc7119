"""Architectures, level weights, generation and the model directory on disk."""
