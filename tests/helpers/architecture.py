"""Facts about the source tree, read from the syntax trees: imports, lengths, identifiers, docstrings."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Graph = dict[str, set[str]]

PACKAGE = "dadplug"
# All of them are installed as parts of the package.
FOLDERS = ("dadplug", "hooks", "runners", "callbacks", "examples/zoo")


def python_files(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    """Yield the Python files below `folders`, in a fixed order."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


@functools.cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, the module first; files are parsed once, until `forget`."""
    return _nodes(path.read_text())


forget = _nodes.cache_clear


def module_name(path: Path) -> str:
    """Return the dotted name of a file given relative to the root: hooks/linear.py is dadplug.hooks.linear."""
    parts = list(path.with_suffix("").parts)
    if parts[0] != PACKAGE:
        parts.insert(0, PACKAGE)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def import_graph(root: Path) -> Graph:
    """Return the modules that each module imports, those imported for type checking or in functions included.

    An import of a name from a package counts as an import of the submodule with that name, if there is one, and
    of the package otherwise. Importing a submodule does not count as importing the packages around it.
    """
    paths = {module_name(path.relative_to(root)): path for path in python_files(root, FOLDERS)}
    graph: Graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set(_imported(nodes(path), package, paths))
        graph[module] = found - {module}
    return graph


def _imported(found: Iterable[ast.AST], package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                source = ".".join(parents[: len(parents) - node.level + 1] + ([source] if source else []))
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                if submodule in modules:
                    yield submodule
                elif source in modules:
                    yield source


def other_imports(path: Path, local: bool = True) -> set[str]:
    """Return the modules outside the package that a file imports; without `local`, only those at the top level."""
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    looked_at = nodes(path) if local else module.body
    found = {alias.name for node in looked_at if isinstance(node, ast.Import) for alias in node.names}
    return found | {
        node.module for node in looked_at if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reach = {module: _reachable(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(graph.get(module, ()))
    return found


def layer_of(module: str) -> str:
    """Return the folder or loose module of the package that a module belongs to: dadplug.exchange.codec, exchange."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def imports_of_rooms(graph: Graph) -> dict[str, set[str]]:
    """Return the rooms (`layer_of`) that the modules of each room import, besides their own."""
    found: dict[str, set[str]] = {layer_of(module): set() for module in graph}
    for module, targets in graph.items():
        found[layer_of(module)] |= {layer_of(target) for target in targets} - {layer_of(module)}
    return found


def long_files(root: Path, folders: Iterable[str], limit: int) -> list[str]:
    """Return the files with more lines than `limit`, relative to the root."""
    return [
        path.relative_to(root).as_posix()
        for path in python_files(root, folders)
        if len(path.read_text().splitlines()) > limit
    ]


def long_functions(root: Path, folders: Iterable[str], limit: int) -> list[str]:
    """Return FILE:FUNCTION for functions with more lines than `limit` that no comment explains.

    The comment begins with "# Long:", followed by the reason, and stands in the line above the function (above its
    decorators, if it has some) or in its body.
    """
    found = []
    for path in python_files(root, folders):
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            last = node.end_lineno or node.lineno
            if last - node.lineno + 1 <= limit:
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if not any(re.match(r"\s*# Long: \S", line) for line in lines[max(0, first - 2) : last]):
                found.append(f"{path.relative_to(root).as_posix()}:{node.name}")
    return found


def identifiers(root: Path) -> Counter[str]:
    """Return the names that the package uses (of classes, functions, arguments, variables, attributes, modules)."""
    found: Counter[str] = Counter()
    for path in python_files(root, FOLDERS):
        found[path.stem] += 1
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] += 1
            elif isinstance(node, ast.Name):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute):
                found[node.attr] += 1
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                found[node.arg] += 1
    return found


def docstrings(root: Path, folders: Iterable[str] = FOLDERS) -> Iterator[tuple[str, str]]:
    """Yield (FILE:NAME, docstring) for the modules, classes and functions that have one."""
    for path in python_files(root, folders):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield f"{path.relative_to(root).as_posix()}:{getattr(node, 'name', '')}", text
