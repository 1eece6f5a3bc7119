"""The Python files and config.json of an exported Hugging Face folder.

    configuration_fenwick.py, modeling_fenwick.py, tokenization_fenwick.py, kernels_fenwick.py

are merged from this folder's modules and everything of ours that they need
(models/huggingface/merge.py). They import torch, transformers and, for the tokenizer, numpy and
sentencepiece. The one thing that is not taken word for word is ModelConfig: pydantic checked the
settings when they were written, so that here plain objects hold them (`_plain_config`).
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.generation_settings import GenerationSettings
from models.huggingface.merge import ROOT, merge
from models.weights import FORMAT_VERSION

CONFIGURATION = "configuration_fenwick"
MODELING = "modeling_fenwick"
TOKENIZATION = "tokenization_fenwick"
GPU_KERNELS = "kernels_fenwick"
PARAMETER_PREFIX = "model."
"""FenwickForCausalLM names its parameters model.<name in LanguageModel>."""
_HEADER = '''"""{title}

Generated from the sources of Fenwick by `python -m models export --format huggingface`; changes
belong there. Needs {needs}.
"""

'''
_SECTION = '''
class _Section:
    """Settings from config.json; they were checked when the folder was written."""

    sections: dict = {}

    def __init__(self, values: dict) -> None:
        for name, value in values.items():
            if name in self.sections and value is not None:
                value = self.sections[name](value)
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    @classmethod
    def model_validate(cls, values: dict) -> "_Section":
        return cls(values)
'''


def code_files() -> dict[str, str]:
    """File name -> content of every Python file of the folder.

    Raises:
        ValueError: our modules cannot be merged; the message names what stands in the way.
    """
    kernels = gpu_modules(ROOT / "kernels")
    siblings = {
        "models.huggingface.configuration": CONFIGURATION,
        **dict.fromkeys(kernels, GPU_KERNELS),
    }
    rewrites = {"models.config": _plain_config}
    roots = {
        CONFIGURATION: ("configuration", "Configuration of the model.", "transformers"),
        MODELING: (
            "modeling",
            "Log-linear attention language model for transformers.",
            "torch and transformers",
        ),
        TOKENIZATION: (
            "tokenization",
            "Tokenizer of the model.",
            "transformers, sentencepiece and numpy",
        ),
    }
    files = {}
    for file_name, (module, title, needs) in roots.items():
        source = merge([f"models.huggingface.{module}"], siblings, rewrites)
        files[f"{file_name}.py"] = _HEADER.format(title=title, needs=needs) + source
    if kernels:
        source = merge(kernels, {}, rewrites)
        header = _HEADER.format(title="Kernels for GPUs.", needs="torch and triton")
        files[f"{GPU_KERNELS}.py"] = header + _optional(source, "triton")
    return files


def _optional(source: str, package: str) -> str:
    """The source with its imports of `package` inside try.

    transformers refuses a folder whose files import what is not installed, but for what they
    import inside try. The kernels' file is imported only where there is a GPU.
    """
    imports = re.compile(rf"^(?:import|from) {package}\b.*\n", re.MULTILINE)
    guarded = "".join("    " + line for line in imports.findall(source))
    return f"try:\n{guarded}except ImportError:\n    raise\n" + imports.sub("", source)


def gpu_modules(folder: Path) -> list[str]:
    """Modules of the folder that need Triton when they are imported and are asked for by others
    that do not, inside a function; command lines aside, which no model needs.

    They get a file of their own, imported where they are used, for Triton is not everywhere.
    """
    at_import, anywhere = {}, {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join([folder.name, *path.relative_to(folder).with_suffix("").parts])
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_import[name] = {m for node in tree.body for m in _imported(node)}
        anywhere[name] = {m for node in ast.walk(tree) for m in _imported(node)}
    with_triton = {"triton"}
    while (
        more := {name for name, others in at_import.items() if others & with_triton} - with_triton
    ):
        with_triton |= more
    askers = [n for n in anywhere if n not in with_triton and not n.endswith(".__main__")]
    asked_for = {module for name in askers for module in anywhere[name]}
    return sorted(with_triton & asked_for & at_import.keys())


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {node.module or ""}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


def write_folder(
    directory: Path,
    config: ModelConfig,
    generation: GenerationSettings,
    dtype: str,
    tokenizer: bool,
) -> None:
    """Writes the code, config.json and, if there is a tokenizer, tokenizer_config.json.

    Args:
        dtype: of the stored matrices, "float32" or "bfloat16".
    """
    for name, content in code_files().items():
        if tokenizer or not name.startswith(TOKENIZATION):
            (directory / name).write_text(content, encoding="utf-8")
    _write_json(directory / "config.json", _config(config, generation, dtype))
    if tokenizer:
        _write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "FenwickTokenizer",
                "auto_map": {"AutoTokenizer": [f"{TOKENIZATION}.FenwickTokenizer", None]},
                "add_bos_token": True,
                "model_max_length": config.max_seq_len,
                "clean_up_tokenization_spaces": False,
            },
        )


def _config(config: ModelConfig, generation: GenerationSettings, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["FenwickForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.FenwickConfig",
            "AutoModelForCausalLM": f"{MODELING}.FenwickForCausalLM",
        },
        "model_type": "fenwick",
        "dtype": dtype,
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": generation.eos_token_id,
        "pad_token_id": generation.pad_token_id,
        "fenwick": {"format_version": FORMAT_VERSION, "model": config.model_dump(mode="json")},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _plain_config(source: str) -> str:
    """models/config.py with its pydantic classes as plain ones: names of settings, properties."""
    tree = ast.parse(source)
    sections = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(_name(b) == "_Section" for b in node.bases)
    }
    parts = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "_Section":
            parts.append(_SECTION)
        elif isinstance(node, ast.ClassDef) and node.name in sections:
            parts.append(_plain_class(source, node, sections))
        else:
            parts.append(ast.get_source_segment(source, node) or "")
    return "\n\n".join(parts)


def _plain_class(source: str, node: ast.ClassDef, sections: set[str]) -> str:
    body = [f'    """{ast.get_docstring(node) or "Settings."}"""\n']
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    body += [f"    {_name(f.target)}: {ast.unparse(f.annotation)}" for f in fields]
    nested = [
        f'        "{_name(f.target)}": {inner.id},'
        for f in fields
        for inner in ast.walk(f.annotation)
        if isinstance(inner, ast.Name) and inner.id in sections
    ]
    if nested:
        body.append("\n".join(["    sections = {", *nested, "    }"]))
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and not _is_validation(inner):
            decorators = [f"    @{ast.unparse(d)}" for d in inner.decorator_list]
            text = ast.get_source_segment(source, inner, padded=True) or ""
            body.append("\n".join(["", *decorators, text]))
    return f"class {node.name}(_Section):\n" + "\n".join(body)


def _is_validation(function: ast.FunctionDef) -> bool:
    """Validators and the private methods that they are made of."""
    return function.name.startswith("_")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
