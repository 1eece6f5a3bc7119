"""Who may import whom, and that each folder's name is ours."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "data_prep": set(),
    "kernels": set(),
    "models": {"kernels", "data_prep.tokenizer"},
    "eval": {"models", "data_prep"},
    "pretrain": {"models", "data_prep", "eval"},
    "launch": {
        "pretrain.config",
        "models.checkpoint_directory",
        "models.accounting",
        "data_prep.ray_cluster",
        "data_prep.command_line",
        "data_prep.early_interrupt",
    },
}


def imported_modules(source: str) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return modules


def violations(folder: str, source: str) -> set[str]:
    allowed = MAY_IMPORT[folder] | {folder}
    ours = {m for m in imported_modules(source) if m.split(".")[0] in MAY_IMPORT}
    return {m for m in ours if not any(m == a or m.startswith(a + ".") for a in allowed)}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_downward_only(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {}
    for file in files:
        bad = violations(folder, file.read_text())
        if bad:
            found[str(file.relative_to(ROOT))] = sorted(bad)
    assert not found, f"{folder}/ may import only {sorted(MAY_IMPORT[folder])}: {found}"


@pytest.mark.parametrize(
    ("folder", "source", "bad"),
    [
        ("models", "from eval.task import Task", {"eval.task", "eval.task.Task"}),
        ("launch", "from pretrain.train import main", {"pretrain.train", "pretrain.train.main"}),
        ("launch", "from pretrain.config import RunConfig", set()),
        ("kernels", "import torch, models.config", {"models.config"}),
    ],
)
def test_the_rule_sees_violations(folder, source, bad):
    assert violations(folder, source) == bad


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_each_name_resolves_inside_this_repository(folder):
    spec = importlib.util.find_spec(folder)
    assert spec is not None
    assert Path(spec.origin) == ROOT / folder / "__init__.py", (
        f"`import {folder}` finds {spec.origin}; uninstall the distribution that owns it"
    )


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_packages_hold_a_docstring_only(folder):
    body = ast.parse((ROOT / folder / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_there_is_no_drawer_for_odds_and_ends():
    names = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not [
        p for folder in MAY_IMPORT for p in (ROOT / folder).rglob("*.py") if p.name in names
    ]
