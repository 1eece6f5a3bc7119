"""Modules merged into one file: the same meaning, or a refusal that names why not."""

import ast
from pathlib import Path

import pytest

from models.huggingface import merge as merge_module
from models.huggingface.folder import code_files, gpu_modules
from models.huggingface.merge import merge

ALLOWED = {"torch", "triton", "transformers", "sentencepiece", "numpy"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two folders whose modules a test writes."""
    monkeypatch.setattr(merge_module, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "models").mkdir()
    return tmp_path


def write(tree: Path, **modules: str) -> None:
    for name, source in modules.items():
        (tree / f"{name.replace('__', '/')}.py").write_text(source)


def run(source: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(source, "merged", "exec"), names)
    return names


def test_only_what_is_needed_is_kept_in_the_order_of_dependencies(tree: Path) -> None:
    write(
        tree,
        kernels__a='import math\n\n# why\nONE = 1\n"""What it is."""\n\ndef unused():\n    pass\n',
        kernels__b="from kernels.a import ONE\n\ndef two():\n    return ONE + 1\n",
        models__c="from kernels.b import two\n\nTHREE = two() + 1\n",
    )
    merged = merge(["models.c"], {}, {})
    assert run(merged)["THREE"] == 3
    assert '# why\nONE = 1\n"""What it is."""' in merged
    assert "unused" not in merged
    assert "math" not in merged


def test_private_names_that_clash_are_told_apart(tree: Path) -> None:
    part = "from dataclasses import dataclass\n\ndef _help(x):\n    return x.{0} + {1}\n"
    write(
        tree,
        kernels__a=part.format("_help", 1) + "\ndef f(x):\n    return _help(x)\n",
        models__b="from kernels.a import f\n"
        + part.format("_help", 2)
        + "\ndef g(x):\n    return f(x) * 100 + _help(x)\n",
    )
    names = run(merge(["models.b"], {}, {}))

    class X:
        _help = 5

    assert names["g"](X()) == 607  # type: ignore[operator]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("def f():\n    pass\n", "def f():\n    pass\n", "both define f: rename one"),
        ("def f():\n    pass\n", "from math import f\nX = f\n", "defines f, which is imported"),
        (
            "from math import pi as f\nF = f\n",
            "from math import e as f\nX = f\n",
            "f is imported tw",
        ),
        ("F = 1\n", "from kernels.a import F as G\nX = G\n", "imports F under another name"),
        ("F = 1\n", "from kernels.a import H\nX = H\n", "imports H from kernels.a, which does not"),
        ("F = 1\n", "import kernels.a\nX = kernels.a.F\n", "imports kernels.a whole"),
        ("F = 1\n", "X = lost\n", "reads names that nothing defines: lost"),
        ("F = 1\n", "def x():\n    return lost\n", "reads names that nothing defines: lost"),
        (
            "F = 1\n",
            "def x():\n    from kernels.a import F\n    return F\n",
            "inside x: such an im",
        ),
    ],
)
def test_what_would_change_the_meaning_is_refused(
    first: str, second: str, message: str, tree: Path
) -> None:
    uses = "Y = F\n" if "F" in first else "Y = f\n"
    root = "from kernels.a import F\n" if "F" in first else "from kernels.a import f\n"
    write(tree, kernels__a=first, kernels__b=second)
    name = "x" if "def x" in second else ("f" if "def f" in second else "X")
    write(tree, models__c=f"from kernels.b import {name}\nZ = {name}\n", models__d=root + uses)
    write(tree, models__e="from models.c import Z\nfrom models.d import Y\nW = (Z, Y)\n")
    with pytest.raises(ValueError, match=message):
        merge(["models.e"], {}, {})


def test_modules_that_need_triton_get_a_file_of_their_own(tree: Path) -> None:
    write(
        tree,
        kernels__shared="def twice(x):\n    return 2 * x\n",
        kernels__fast="import triton\nfrom kernels.shared import twice\n\nFAST = twice(4)\n",
        kernels__bench="import triton\n\nBENCH = triton\n",
        kernels__op="from kernels.shared import twice\n\ndef op(fast):\n    if fast:\n"
        "        from kernels.fast import FAST\n        return FAST\n    return twice(3)\n",
    )
    found = gpu_modules(tree / "kernels")
    assert found == ["kernels.fast"]
    main = merge(["kernels.op"], dict.fromkeys(found, "kernels_fenwick"), {})
    assert "        from .kernels_fenwick import FAST\n" in main
    assert "triton" not in main
    assert run(main)["op"](False) == 6  # type: ignore[operator]
    assert run(merge(found, {}, {}).replace("import triton\n", ""))["FAST"] == 8


def test_generated_files_import_nothing_of_ours() -> None:
    files = code_files()
    assert sorted(files) == [
        "configuration_fenwick.py",
        "kernels_fenwick.py",
        "modeling_fenwick.py",
        "tokenization_fenwick.py",
    ]
    for content in files.values():
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [] if node.level else [node.module or ""]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                assert top in ALLOWED or top in __import__("sys").stdlib_module_names, module


def test_transformers_loads_the_folder_where_there_is_no_triton(tmp_path: Path) -> None:
    from transformers.dynamic_module_utils import get_imports

    for file, content in code_files().items():
        (tmp_path / file).write_text(content)
        assert "triton" not in get_imports(str(tmp_path / file))
    assert "import triton" in (tmp_path / "kernels_fenwick.py").read_text()


def test_generated_code_is_our_source_word_for_word() -> None:
    modeling = code_files()["modeling_fenwick.py"]
    root = Path(merge_module.ROOT)
    for file, name in (
        ("models/mamba2.py", "class Mamba2"),
        ("models/level_weights.py", "class LevelWeights"),
        ("kernels/log_linear_ssd/chunked.py", "def log_linear_ssd_chunked"),
    ):
        source = (root / file).read_text()
        node = next(
            n
            for n in ast.parse(source).body
            if isinstance(n, ast.ClassDef | ast.FunctionDef) and name.split()[1] == n.name
        )
        text = ast.get_source_segment(source, node)
        assert text is not None
        # One private name is told apart from another module's.
        assert text.replace("_by_level(", "_kernels_log_linear_ssd_chunked_by_level(") in modeling
