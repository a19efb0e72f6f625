"""The package's imports have no circle, and its functions are short."""

import ast
import graphlib
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "arraylogchain"
# Imported within functions, when a call needs them; they may import whoever calls them.
LAZY = tuple(f"arraylogchain.{name}" for name in ("_compiled", "_cuda", "_dask", "_torch"))
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
    """Return the package's modules that a module imports, but for lazy imports."""
    in_functions = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        for target in targets(node):
            name = target if target in PATHS else target.rpartition(".")[0]
            if name in PATHS and not (node in in_functions and name.startswith(LAZY)):
                found.add(name)
    return found


def circle(graph):
    """Return names that import one another in a circle, the first once more at the end."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_private_interfaces_of_others():
    """Those that were once in use here, and change without notice."""
    private = ("torch._C", "_current_level", "_task_spec")
    found = [(x, word) for x, path in PATHS.items() for word in private if word in path.read_text()]
    assert not found


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}))) == ["b", "c"]


def test_lazy_imports_do_not_count():
    lazy = "def f():\n    from arraylogchain._torch import chain"
    assert imports(ast.parse(lazy)) == set()
    assert imports(ast.parse(lazy.replace("_torch", "_cuda"))) == set()
    eager = "if TYPE_CHECKING:\n    from arraylogchain.plan import Plan\nimport arraylogchain.chain"
    assert imports(ast.parse(eager)) == {"arraylogchain.plan", "arraylogchain.chain"}
    within = "def f():\n    from arraylogchain import plan"
    assert imports(ast.parse(within)) == {"arraylogchain.plan"}


def test_imports_have_no_circle():
    found = circle({name: imports(tree) for name, tree in TREES.items()})
    assert not found, " imports ".join(found)


def code_lines(path, tree):
    """Return the numbers of lines with code: neither docstrings nor comments, and not blank."""
    no_code = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if tokenize.tok_name[token.type] not in no_code:
            lines |= set(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@pytest.mark.parametrize("name", PATHS)
def test_functions_are_short(name):
    lines = code_lines(PATHS[name], TREES[name])
    sizes = {
        node.name: len(lines.intersection(range(node.lineno, node.end_lineno + 1)))
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef)
    }
    assert {function: size for function, size in sizes.items() if size > MOST_LINES} == {}
