"""Operators on tensors: log-linear SSD, log-linear gated delta rule, short convolution.

Kept empty on purpose: another distribution of this name exists and transformers probes for it.
"""
