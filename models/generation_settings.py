"""generation_config.json: which tokens start and end a text, and how to choose the next one.

The names are those of Hugging Face, so that one file serves a model directory and an exported
folder. Chosen by default: the most likely token.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.checkpoint_directory import write_atomically

FILE_NAME = "generation_config.json"


@dataclass(frozen=True)
class GenerationSettings:
    """Ids are None where a model has no tokenizer; pad_token_id fills prompts up on the left."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False

    def save(self, directory: Path) -> None:
        """Writes generation_config.json."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        write_atomically(directory / FILE_NAME, json.dumps(content, indent=1).encode())


def read_generation_settings(directory: Path) -> GenerationSettings | None:
    """The settings of a folder, None where it has none; keys that are not ours are left out.

    Raises:
        ValueError: the file is not a JSON object, or an id is not an integer.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        content: Any = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    ids = {name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in ids.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{path}: {name} must be an integer: got {value!r}")
    return GenerationSettings(**ids, do_sample=bool(content.get("do_sample", False)))
