"""The package's syntax trees, for tests of what is called where."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (ROOT / "src" / "elaswave", ROOT / "src" / "elaswave_rivals", ROOT / "verify")
"""What is installed, and what tries it out under the same rules."""


def modules(*packages: Path) -> Iterator[tuple[str, Path]]:
    """Every module of some packages with its file."""
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the qualified name of the function that it is in; "" outside of any."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}" if inside else node.name
        yield name, node
        yield from functions(node, name)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an expression of names; else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
