"""README, CONTRIBUTING and config headers are executed as far as parsing goes: a command that they
show exists, and takes what they give it. The quickstart's test runs them for real."""

import ast
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest
import typer

from pretrain.config import load_config
from pretrain.sweep import load as load_sweep

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "pretrain" / "configs").glob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
COMMAND = r"(python -m|torchrun|deepspeed|make|tensorboard|launch/\S+|sbatch|kubectl|docker) "


def commands(path: Path) -> list[str]:
    """Command lines: indented code in Markdown, `#   ` comments at the head of a config."""
    lead = "#   " if path.suffix == ".yaml" else "    "
    text = path.read_text().replace("\\\n", " ")
    lines = [line.removeprefix(lead) for line in text.splitlines() if line.startswith(lead)]
    return [line for line in lines if re.match(COMMAND, line)]


SWEEPS = sorted((ROOT / "pretrain" / "configs" / "sweeps").glob("*.yaml"))
SHOWN = [(path, line) for path in [*DOCUMENTS, *CONFIGS, *SWEEPS] for line in commands(path)]


def parse(arguments: list[str]) -> None:
    """Parse what follows `python -m`; nothing runs."""
    module, *rest = arguments
    if module == "launch" and "--module" in rest:
        command = typer.main.get_command(importlib.import_module("launch.module").app)
        context = command.make_context(module, rest)
        parse([context.params["module"], *context.args])
        return
    app = importlib.import_module(module if "." in module else f"{module}.__main__").app
    command = typer.main.get_command(app)
    context = command.make_context(module, list(rest))
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(command.name, list(rest), parent=context)
    config = context.params.get("config")
    if command.name == "sweep":
        load_sweep(ROOT / config)
    elif module in ("launch", "pretrain") and str(config) not in ("None", "CONFIG"):
        load_config(ROOT / config, context.params["overrides"] or [])


@pytest.mark.parametrize(("path", "line"), SHOWN, ids=[line[:60] for _, line in SHOWN])
def test_a_shown_command_is_one_that_exists(path, line):
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        parse(words[2:])
    elif words[0] == "torchrun":
        parse(words[words.index("-m") + 1 :])
    elif words[0] == "deepspeed":
        parse(words[words.index("--module") + 1 :])
    elif words[0] == "sbatch":
        script = words.index("launch/slurm.sbatch")
        parse(["launch", *words[script + 1 :]])
        assert all(word.startswith("--") for word in words[1:script:2])
    elif words[0] in ("kubectl", "docker"):
        if "-f" in words:
            assert (ROOT / words[words.index("-f") + 1]).is_file()
    elif words[0].startswith("launch/"):
        assert os.access(ROOT / words[0], os.X_OK)
        assert words[1] in ("up", "down")
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = [word for word in words[1:] if "=" not in word]
        assert named
        assert set(named) <= set(targets)
    else:
        assert words[:2] == ["tensorboard", "--logdir"]


def test_the_documents_show_commands():
    assert len(SHOWN) > 20


def messages() -> list[str]:
    """Every text in the sources, with a space for what is put into it when it runs."""
    found = [path.read_text() for path in (ROOT / "launch").glob("*.s*")]
    for folder in ("launch", "pretrain", "eval", "data_prep"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", " ") for part in node.values]
                    found.append("".join(part if isinstance(part, str) else " " for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_the_error_lines_of_the_launch_document_are_those_of_the_programs() -> None:
    table = (ROOT / "docs" / "launch.md").read_text().split("## When something is wrong")[1]
    lines = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(lines) > 10
    texts = messages()
    for line in lines:
        pieces = [re.escape(piece.strip()) for piece in line.split("…") if piece.strip()]
        if "No such file" in line:  # the system's own words
            pieces = pieces[:1]
        assert any(re.search(".*".join(pieces), text, re.DOTALL) for text in texts), line


def test_an_unknown_option_is_seen():
    with pytest.raises(Exception, match="(?i)no such option"):
        parse(["launch", "CONFIG", "--no-such-thing"])


def test_links_lead_somewhere():
    for path in [*DOCUMENTS, ROOT / "ARCHITECTURE.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (path, target)
    for path in (ROOT / "ARCHITECTURE.md", ROOT / "kernels" / "README.md"):
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|md|yaml))`", path.read_text()):
            assert (
                (ROOT / name).exists()
                or (path.parent / name).exists()
                or list(path.parent.rglob(name.split("/")[-1]))
            ), (path, name)


def test_no_document_names_a_machine_or_a_tool_of_ours():
    forbidden = re.compile(r"/work/|/opt/py" + "pi|shared/|py" + r"pi\.org|/root/")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *CONFIGS, *SWEEPS, ROOT / "Makefile"]:
        assert not forbidden.search(path.read_text()), path
