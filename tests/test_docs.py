"""The user guide's examples run, and its reference lists everything public."""

import ast
import re
import warnings
from pathlib import Path

import pytest

import arraylogchain as alc
from tests.conftest import import_or_skip

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = [
    pytest.param(page.name, example, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, example in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
]
# Other libraries that examples convert from.
PEERS = ("dynamax", "hmmlearn", "pomegranate", "torch_struct", "torchcrf")


def imported(example):
    """Return the names of the libraries that an example imports."""
    names = set()
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_example_runs(page, example):
    libraries = imported(example)
    of_peers = not libraries.isdisjoint(PEERS)
    with warnings.catch_warnings():
        if of_peers:
            warnings.simplefilter("ignore")  # theirs
        for library in ("dask", "torch", *PEERS):
            if library in libraries:
                import_or_skip(library)
        # The namespace is empty: every example stands on its own.
        exec(compile(example, page, "exec"), {})


def test_every_page_has_examples():
    pages = {param.values[0] for param in EXAMPLES}
    # One page is a table that a script writes.
    assert pages == {page.name for page in DOCS.glob("*.md")} - {"kernels.md", "hot_loops.md"}


def test_every_peer_is_shown():
    assert set(PEERS) <= set().union(*(imported(param.values[1]) for param in EXAMPLES))


@pytest.mark.parametrize(
    "name",
    [
        *(n for n in alc.__all__ if n not in ("vjp", "__version__")),
        *(f"arraylogchain.vjp.{n}" for n in alc.vjp.__all__),
        *(n for n in vars(alc.LogChain) if not n.startswith(("_", "kept_"))),
    ],
)
def test_reference_lists(name):
    assert re.search(rf"\b{re.escape(name)}\b", (DOCS / "api.rst").read_text("utf-8"))


def listed_in_layout():
    """Yield folders of the package, and the files and folders that CONTRIBUTING says they have."""
    text = (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8")
    for folder, table in re.findall(
        r"^\| in `([\w/]+)/` \| \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M
    ):
        first_cells = (row.split("|")[1] for row in table.splitlines())
        yield folder, [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(("folder", "listed"), list(listed_in_layout()))
def test_layout_lists_every_file(folder, listed):
    ignored = ("__init__.py", "__pycache__")
    found = [p for p in (DOCS.parent / folder).iterdir() if p.name not in ignored]
    names = [f"{p.name}/" for p in found if p.is_dir()] + [
        p.name for p in found if p.suffix == ".py"
    ]
    assert sorted(listed) == sorted(names)


def test_layout_lists_every_folder():
    folders = {p.parent for p in (DOCS.parent / "arraylogchain").rglob("*.py")}
    # These only have folders, or are described as a whole.
    folders -= {
        DOCS.parent / "arraylogchain" / name
        for name in ("_array", "_cuda/products", "_cuda/chains")
    }
    assert {DOCS.parent / folder for folder, _ in listed_in_layout()} == folders


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_images_and_links_exist(page):
    text = (DOCS / page).read_text("utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]*)[^)]*\)", text):
        assert (DOCS / target).exists(), target
    for image in re.findall(r"^```\{figure\} (.*)$", text, re.MULTILINE):
        assert (DOCS / image).exists(), image
