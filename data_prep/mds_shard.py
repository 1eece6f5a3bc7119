"""One MDS shard as streaming's MDSWriter makes it, to the byte.

Written here and not through streaming because importing that package imports torch, torchvision and
transformers: 5 seconds and 600 MB in every process that packs. A test holds the two against each
other; reading goes through streaming.

    uint32 samples | uint32 offsets[samples + 1] | JSON of the columns | samples
    a sample: uint32 size of each column of variable size | columns in the order of their names
    an array of variable length: byte 4 + log2(bytes of n) | n | values
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset_folder import write_atomically


def write_mds_shard(path: Path, tokens: np.ndarray, document_starts: Sequence[np.ndarray]) -> Any:
    """Write a shard atomically; returns its entry for index.json.

    tokens: [rows, row_tokens] uint16 or uint32. document_starts: one not empty array a row.
    """
    rows, row_tokens = tokens.shape
    config = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": None,
        "column_names": ["document_starts", "tokens"],
        "column_encodings": ["ndarray:uint32", f"ndarray:{tokens.dtype.name}:{row_tokens}"],
        "column_sizes": [None, row_tokens * tokens.dtype.itemsize],
    }
    header = json.dumps(config, sort_keys=True).encode()
    samples = []
    for row, starts in zip(tokens, document_starts, strict=True):
        encoded = _with_length(starts.astype(np.uint32))
        samples.append(len(encoded).to_bytes(4, "little") + encoded + row.tobytes())
    first = 4 + 4 * (rows + 1) + len(header)
    offsets = first + np.cumsum([0, *map(len, samples)])
    content = b"".join(
        [rows.to_bytes(4, "little"), offsets.astype(np.uint32).tobytes(), header, *samples]
    )
    write_atomically(path, content)
    raw_data = {
        "basename": path.name,
        "bytes": len(content),
        "hashes": {"sha256": hashlib.sha256(content).hexdigest()},
    }
    return {"samples": rows, "raw_data": raw_data, "zip_data": None, **config}


def _with_length(values: np.ndarray) -> bytes:
    """A one-dimensional array behind its length, in the smallest integer that holds that."""
    code = next(n for n in range(4) if len(values) < 1 << (8 << n))
    return bytes([1 << 2 | code]) + len(values).to_bytes(1 << code, "little") + values.tobytes()
