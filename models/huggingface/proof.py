"""Loads an exported folder the way a stranger does: a new process, without this repository.

Run as a script by `folder_logits`, where the root of the repository is not on sys.path:

    python -I proof.py '{"path": [...], "folder": ..., "ids": ..., "text": ..., "output": ...}'
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OURS = ("kernels", "models", "data_prep", "eval", "pretrain", "launch")


def check_transformers() -> None:
    """ValueError where transformers is not installed: nothing could be proven."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "format huggingface needs transformers to prove its result: got none; "
            "install it, or export with --format fenwick"
        )


def folder_logits(folder: Path, ids: list[int], text: str | None) -> tuple[Any, list[int] | None]:
    """What transformers computes from an exported folder.

    Args:
        ids: one row of tokens.
        text: tokenized too, if there is a tokenizer.

    Returns:
        logits [1, T, vocab_size] fp32, and the tokens of `text` or None.

    Raises:
        RuntimeError: it does not load; the message is the last line of what it said.
    """
    from safetensors.torch import load_file

    path = [p for p in sys.path if p and Path(p).resolve() != ROOT]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "logits.safetensors"
        request = {
            "path": path,
            "folder": str(folder.resolve()),
            "ids": ids,
            "text": text,
            "output": str(output),
        }
        # transformers copies the code before it runs it: not into the user's own cache.
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-I", __file__, json.dumps(request)],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise RuntimeError(f"transformers does not load what was written: {said[-1]}")
        return load_file(output)["logits"], json.loads(done.stdout.splitlines()[-1])


def _main(request: dict[str, Any]) -> None:
    sys.path[:] = request["path"]
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = None
    if request["text"] is not None:
        tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True)
        tokens = tokenizer(request["text"]).input_ids
    fp32 = {"torch_dtype" if transformers.__version__ < "4.56" else "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True, **fp32)
    with torch.no_grad():
        logits = model(torch.tensor([request["ids"]])).logits
    if reached := [name for name in OURS if name in sys.modules]:
        raise ImportError(f"the exported code imported {reached} from the repository")
    save_file({"logits": logits}, request["output"])
    print(json.dumps(tokens))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
