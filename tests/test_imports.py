"""The package's imports have no circle, and its functions are short."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "arraylogchain"
MOST_LINES = 50


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in PATHS.items()}


def targets(node):
    """Return the names of modules, or of what is in them, that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(tree):
    """Return the package's modules that a module imports, at its top or in functions."""
    result = set()
    for node in ast.walk(tree):
        for target in targets(node):
            name = target if target in PATHS else target.rpartition(".")[0]
            if name in PATHS:
                result.add(name)
    return result


def test_no_private_interfaces_of_others():
    """Those that were once in use here, and change without notice."""
    private = ("torch._C", "_current_level", "_task_spec")
    result = [
        (x, word) for x, path in PATHS.items() for word in private if word in path.read_text()
    ]
    assert not result


def test_imports_in_functions_count():
    lazy = "def f():\n    from arraylogchain._torch import chain"
    assert imports(ast.parse(lazy)) == {"arraylogchain._torch.chain"}
    eager = "if TYPE_CHECKING:\n    from arraylogchain.einsum import x\nimport arraylogchain.chain"
    assert imports(ast.parse(eager)) == {"arraylogchain.einsum", "arraylogchain.chain"}


def test_imports_have_no_circle():
    """Else the error names the modules that import one another."""
    graphlib.TopologicalSorter({name: imports(tree) for name, tree in TREES.items()}).prepare()


def test_modules_import_only_rows_below_theirs():
    """In the table of CONTRIBUTING.md; __init__.py imports what is public."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
    table = text.partition("| in `arraylogchain/` | |")[2].partition("\n\n")[0]
    rows = {
        name.rstrip("/").removesuffix(".py"): number
        for number, row in enumerate(table.splitlines())
        for name in re.findall(r"`([\w/.]+)`", row.split(" | ")[0])
    }
    upward = [
        f"{name} imports {target}"
        for name, tree in TREES.items()
        for target in imports(tree)
        if "." in name and rows[name.split(".")[1]] > rows[target.split(".")[1]]
    ]
    assert upward == []


@pytest.mark.parametrize("name", PATHS)
def test_functions_are_short(name):
    """In lines on which code begins, docstrings left out."""
    sizes = {
        node.name: len(
            {n.lineno for part in node.body for n in ast.walk(part) if hasattr(n, "lineno")}
        )
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef)
    }
    assert {function: size for function, size in sizes.items() if size > MOST_LINES} == {}
