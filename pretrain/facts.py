"""What numbers were measured on: the device, and the commit of the code."""

import platform
import subprocess
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """The device's name, or the CPU's kind with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads of {platform.machine()}"


def code_commit() -> str:
    """The commit, with + where files differ from it; "unknown" outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        pipe = subprocess.DEVNULL
        head = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True, stderr=pipe
        )
        changed = subprocess.check_output([*git, "status", "--porcelain"], text=True, stderr=pipe)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed.strip() else "")
