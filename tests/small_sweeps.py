"""Sweeps of small models for tests: a file with changes, the shipped ones, the command."""

import subprocess
import sys
from pathlib import Path

import yaml

from pretrain.sweep_config import load_sweep
from pretrain.sweep_file import read_tree

ROOT = Path(__file__).parent.parent
ALL = sorted((ROOT / "pretrain" / "configs" / "sweeps").glob("*.yaml"))
SHIPPED = [path for path in ALL if "config" not in read_tree(path)]  # the others train whole runs


def tree(folder, **changes):
    settings = {
        "sweep_dir": str(folder),
        "task": {"name": "mqar", "variant": "zoology", "vocab_size": 64},
        "grid": {
            "mixer": ["attention"],
            "d_model": [16],
            "seq_len": [16],
            "pairs": [1, 2],
            "peak_lr": [0.01],
            "seed": [0, 1],
        },
        "model": {
            "num_layers": 1,
            "mlp": {"hidden_size": 0},
            "tie_embeddings": True,
            "mamba2": {"head_size": 16, "state_size": 16},
            "attention": {"num_heads": 1},
        },
        "training": {
            "batch_rows": 8,
            "total_steps": 8,
            "train_rows": 20,
            "test_rows": 16,
            "score_every_steps": 2,
            "schedule": "cosine",
        },
    }
    for key, value in changes.items():
        old = settings.get(key, {})
        settings[key] = {**old, **value} if isinstance(value, dict) else value
    return settings


def sweep(tmp_path, **changes):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path / "sweep", **changes)))
    return load_sweep(path)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pretrain", "sweep", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
