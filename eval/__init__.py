"""Evaluation of a checkpoint or model directory: perplexity, WikiText, S-NIAH-1, MQAR."""
