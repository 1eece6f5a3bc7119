"""Corpora to packed MDS shards: tokenizer, sources, packing, shard format, synthetic tasks."""
