"""Imports of the package and of the benchmarks have no cycle, and functions are short."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 50


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def paths_of(folder):
    return {module_name(path): path for path in sorted((ROOT / folder).rglob("*.py"))}


PATHS = paths_of("arraylogchain")
TREES = {
    name: ast.parse(path.read_text("utf-8"))
    for name, path in (PATHS | paths_of("benchmarks")).items()
}


def targets(node):
    """Return the names of the modules, or of their members, that a statement or a call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
            return [node.args[0].value]
    return []


def imports(tree, modules):
    """Return the modules that a module imports, in functions as well."""
    result = set()
    for node in ast.walk(tree):
        for target in targets(node):
            name = target if target in modules else target.rpartition(".")[0]
            if name in modules:
                result.add(name)
    return result


def check_no_cycle(trees):
    """Raise CycleError, which names the modules of a cycle, if there is one."""
    graph = {name: imports(tree, trees) for name, tree in trees.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_private_interfaces_of_others():
    """These were in use once, and change without notice."""
    private = ("torch._C", "_current_level", "_task_spec")
    result = [
        (x, word) for x, path in PATHS.items() for word in private if word in path.read_text()
    ]
    assert not result


@pytest.mark.parametrize(
    "line",
    [
        "import package.second",
        "from package import second",
        "from package.second import name",
        "if TYPE_CHECKING:\n    from package.second import Name",
        "def f():\n    from package.second import name",
        "def f():\n    return importlib.import_module('package.second').name",
        "def f():\n    return import_module('package.second')",
        "second = __import__('package.second')",
    ],
)
def test_cycle_of_any_import_raises(line):
    trees = {"package.first": ast.parse("from package import second")}
    check_no_cycle(trees | {"package.second": ast.parse("import numpy")})
    with pytest.raises(graphlib.CycleError):
        check_no_cycle(trees | {"package.second": ast.parse(line.replace("second", "first"))})


def test_imports_of_package_and_benchmarks_have_no_cycle():
    assert {"arraylogchain.chain", "benchmarks.runner"} <= TREES.keys()
    check_no_cycle(TREES)


def test_modules_import_only_rows_below_theirs():
    """In the table of CONTRIBUTING.md; __init__.py imports what is public."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text.partition("| in `arraylogchain/` | |")[2].partition("\n\n")[0]
    rows = {
        name.rstrip("/").removesuffix(".py"): number
        for number, row in enumerate(table.splitlines())
        for name in re.findall(r"`([\w/.]+)`", row.split(" | ")[0])
    }
    upward = [
        f"{name} imports {target}"
        for name in PATHS
        for target in imports(TREES[name], PATHS)
        if "." in name and rows[name.split(".")[1]] > rows[target.split(".")[1]]
    ]
    assert upward == []


@pytest.mark.parametrize("name", PATHS)
def test_functions_are_short(name):
    """Lines on which code starts are counted."""
    sizes = {
        node.name: len(
            {n.lineno for part in node.body for n in ast.walk(part) if hasattr(n, "lineno")}
        )
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef)
    }
    assert {function: size for function, size in sizes.items() if size > MAX_LINES} == {}
