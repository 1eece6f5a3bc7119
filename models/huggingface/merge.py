"""Many modules of ours into one file that imports none of them.

The result holds, in the order of their dependencies, every top-level statement that the root
module needs, word for word and with its comments. Imports between our modules disappear, since
what they name is now in the same file; imports of others are gathered at the top. So the file
cannot drift from its sources. What would change the meaning is refused: two modules that give
one public name to different things, an import under another name, a name that nothing defines.
Private names that clash are told apart by their module's name.
"""

import ast
import builtins
import io
import re
import symtable
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OURS = ("kernels", "models", "data_prep")

Rewrite = Callable[[str], str]
# (module, what of it with "as" if any), or (module with "as" if any, None) for a whole module.
Import = tuple[str, str | None]


@dataclass
class _Statement:
    """A top-level statement: its text with the comments above it, what it defines, what it uses."""

    text: str
    defines: set[str]
    uses: set[str]
    local_imports: set[str]


@dataclass
class _Module:
    """imports: name -> (module of ours, name there). external: name -> where others define it."""

    name: str
    statements: list[_Statement] = field(default_factory=list)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    external: dict[str, Import] = field(default_factory=dict)
    futures: set[str] = field(default_factory=set)

    def defining(self, name: str) -> _Statement | None:
        return next((s for s in self.statements if name in s.defines), None)


def merge(
    roots: Sequence[str], siblings: Mapping[str, str], rewrites: Mapping[str, Rewrite]
) -> str:
    """The source of the roots with everything of ours that they need.

    Args:
        roots: names of the modules to start from; all of them is kept.
        siblings: modules that become files beside the result: module -> file name without .py.
            They alone may be imported inside functions.
        rewrites: modules whose source is changed before it is read.

    Raises:
        ValueError: the modules cannot be put together; the message says which name is why.
    """
    return _Merge(roots, siblings, rewrites).source()


class _Merge:
    def __init__(
        self, roots: Sequence[str], siblings: Mapping[str, str], rewrites: Mapping[str, Rewrite]
    ) -> None:
        self.roots, self.siblings, self.rewrites = roots, siblings, rewrites
        self.modules: dict[str, _Module] = {}
        self.kept: dict[str, set[int]] = {}  # module -> indices of its statements
        self.external: dict[str, Import] = {}  # by the name that they bind
        for root in roots:
            self._keep_module(root)

    def source(self) -> str:
        order: list[str] = []
        for root in self.roots:
            self._place(root, order)
        renames = self._renames(order)
        parts = []
        for name in order:
            parts.append(f"# {'-' * 8} {name.replace('.', '/')}.py")
            for index in sorted(self.kept[name]):
                text = self.modules[name].statements[index].text
                parts.append(_renamed(text, renames.get(name, {})))
        futures = sorted({f for name in order for f in self.modules[name].futures})
        lines = [*futures, *_import_lines(self.external)]
        text = "\n".join(lines) + "\n\n\n" + "\n\n\n".join(parts) + "\n"
        _check_defined(text)
        return text

    def _keep_module(self, name: str) -> None:
        module = self._module(name)
        for statement in module.statements:
            self._keep(module, statement)

    def _place(self, name: str, order: list[str]) -> None:
        """Appends the modules that have something to keep, each after those it imports."""
        for other in sorted({module for module, _ in self.modules[name].imports.values()}):
            if other in self.modules:
                self._place(other, order)
        if name not in order and self.kept.get(name):
            order.append(name)

    def _keep(self, module: _Module, statement: _Statement) -> None:
        index = module.statements.index(statement)
        kept = self.kept.setdefault(module.name, set())
        if index in kept:
            return
        kept.add(index)
        for inner in sorted(statement.local_imports):
            if inner not in self.siblings:
                raise ValueError(
                    f"{module.name} imports {inner} inside {', '.join(sorted(statement.defines))}: "
                    "such an import would reach outside the file; import it at the top"
                )
            here = re.compile(rf"\bfrom {re.escape(inner)} import\b")
            statement.text = here.sub(f"from .{self.siblings[inner]} import", statement.text)
        for name in sorted(statement.uses):
            self._need(module, name)

    def _need(self, module: _Module, name: str) -> None:
        statement = module.defining(name)
        if statement is not None:
            self._keep(module, statement)
        elif name in module.imports:
            other, original = module.imports[name]
            if other in self.siblings:
                self._import(name, (f".{self.siblings[other]}", original))
            else:
                self._need_from(other, original, module.name)
        elif name in module.external:
            self._import(name, module.external[name])

    def _need_from(self, other: str, name: str, user: str) -> None:
        module = self._module(other)
        if module.defining(name) is None and name not in module.imports:
            raise ValueError(f"{user} imports {name} from {other}, which does not define it")
        self._need(module, name)

    def _import(self, name: str, line: Import) -> None:
        if self.external.setdefault(name, line) != line:
            raise ValueError(f"{name} is imported twice: {self.external[name]} and {line}")

    def _module(self, name: str) -> _Module:
        if name not in self.modules:
            self.modules[name] = _read(name, self.rewrites.get(name))
        return self.modules[name]

    def _renames(self, order: list[str]) -> dict[str, dict[str, str]]:
        """Module -> private names of its own that another module defines too -> new names."""
        owners: dict[str, list[str]] = {}
        for name in order:
            for i in sorted(self.kept[name]):
                for defined in self.modules[name].statements[i].defines:
                    owners.setdefault(defined, []).append(name)
        renames: dict[str, dict[str, str]] = {}
        for defined, modules in owners.items():
            if defined in self.external:
                raise ValueError(f"{modules[0]} defines {defined}, which is imported elsewhere")
            if len(modules) == 1:
                continue
            if not defined.startswith("_"):
                raise ValueError(f"{' and '.join(modules)} both define {defined}: rename one")
            for module in modules:
                new = f"_{module.replace('.', '_')}{defined}"
                renames.setdefault(module, {})[defined] = new
        return renames


def _read(name: str, rewrite: Rewrite | None) -> _Module:
    path = ROOT / Path(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    if rewrite is not None:
        source = rewrite(source)
    lines = source.splitlines()
    module = _Module(name)
    body = ast.parse(source).body
    end = 0  # line after the statement before
    for index, node in enumerate(body):
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        first = start
        while first > end and lines[first - 1].startswith("#"):
            first -= 1
        end = node.end_lineno or node.lineno
        text = "\n".join(lines[first:end])
        if isinstance(node, ast.Import | ast.ImportFrom):
            _read_import(module, node)
        elif isinstance(node, ast.Expr):
            if index and module.statements:  # text under a constant that describes it
                module.statements[-1].text += "\n" + text
        elif _defined(node) != {"__all__"}:
            uses = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            uses |= set(_names_in_annotations(node))
            module.statements.append(_Statement(text, _defined(node), uses, _local_imports(node)))
    return module


def _read_import(module: _Module, node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        bound = alias.asname or alias.name
        if isinstance(node, ast.Import):
            if alias.name.split(".")[0] in OURS:
                raise ValueError(f"{module.name} imports {alias.name} whole: name what it needs")
            suffix = f" as {alias.asname}" if alias.asname else ""
            module.external[bound.split(".")[0]] = (f"{alias.name}{suffix}", None)
            continue
        source = node.module or ""
        if source == "__future__":
            module.futures.add(f"from __future__ import {alias.name}")
        elif source.split(".")[0] in OURS:
            if alias.asname not in (None, alias.name):
                raise ValueError(f"{module.name} imports {alias.name} under another name")
            module.imports[bound] = (source, alias.name)
        else:
            suffix = f" as {alias.asname}" if alias.asname else ""
            module.external[bound] = (source, f"{alias.name}{suffix}")


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _local_imports(node: ast.stmt) -> set[str]:
    """Modules of ours that are imported inside the statement."""
    return {
        inner.module
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] in OURS
        if inner.module
    }


def _names_in_annotations(node: ast.stmt) -> Iterator[str]:
    """Names in annotations that are written as text: -> "FenwickState"."""
    for inner in ast.walk(node):
        annotation = getattr(inner, "annotation", None) or getattr(inner, "returns", None)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            tree = ast.parse(annotation.value, mode="eval")
            yield from (n.id for n in ast.walk(tree) if isinstance(n, ast.Name))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with these names replaced where they are names of the module, not attributes."""
    if not names:
        return text
    lines = text.splitlines(keepends=True)
    found: list[tuple[int, int, str]] = []
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in names and previous != ".":
            found.append((token.start[0] - 1, token.start[1], token.string))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.string
    for row, column, name in reversed(found):
        line = lines[row]
        lines[row] = line[:column] + names[name] + line[column + len(name) :]
    return "".join(lines)


def _check_defined(text: str) -> None:
    """ValueError where a function or the module reads a name that nothing defines."""
    table = symtable.symtable(text, "<merged>", "exec")
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    defined |= set(dir(builtins)) | {"__file__", "__name__"}
    missing = sorted(_globals(table) - defined)
    if missing:
        raise ValueError(f"the merged file reads names that nothing defines: {', '.join(missing)}")


def _globals(table: symtable.SymbolTable) -> set[str]:
    is_module = table.get_type() == "module"
    used = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_referenced() and (s.is_global() or is_module)
    }
    return used.union(*(_globals(child) for child in table.get_children()))


def _import_lines(external: Mapping[str, Import]) -> Iterator[str]:
    """One line a module: whole ones, then names from others, then from files beside this one."""
    yield from sorted(f"import {module}" for module, name in external.values() if name is None)
    names: dict[str, set[str]] = {}
    for module, name in external.values():
        if name is not None:
            names.setdefault(module, set()).add(name)
    for module in sorted(names, key=lambda m: (m.startswith("."), m)):
        yield f"from {module} import {', '.join(sorted(names[module]))}"
