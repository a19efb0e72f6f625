"""The documentation's examples run with what their pages install, and the reference is complete."""

import ast
import re
import sys
import warnings
from pathlib import Path, PurePosixPath
from statistics import NormalDist

import numpy as np
import pytest

import arraylogchain as alc
from tests.conftest import import_or_skip

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.parts]


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def fences(page):
    """Return the snippets of a page that stand on their own."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def cells(page):
    """Return the code that is executed, in one namespace, when the documentation is built."""
    text = page.read_text("utf-8")
    result = re.findall(
        r"^```\{code-cell\}.*\n(?:---\n(?:.*\n)*?---\n)?((?:.*\n)*?)```", text, re.M
    )
    return "\n".join(re.sub(r"^:[\w-]+:.*$", "", cell, flags=re.M) for cell in result)


EXAMPLES = [
    pytest.param(page, example, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.name != "recipes.md"  # tests/test_recipes.py
    for number, example in enumerate(fences(page))
]
# Building the documentation executes them as well.
EXAMPLES += [
    pytest.param(page, cells(page), id=page.stem, marks=pytest.mark.exhaustive)
    for page in PAGES
    if cells(page)
]
# Other libraries that examples convert from.
PEERS = ("dynamax", "hmmlearn", "pomegranate", "pyro", "torch_struct", "torchcrf")
PEERS += ("tensorflow_probability",)
# What can be imported once something is installed, beside a module of its own name.
PROVIDES = {
    ".": {"arraylogchain", "numpy", "numba"},
    "cuda13": {"cupy"},
    "dask": {"distributed"},
    "dynamax": {"jax"},
    "einsum": {"opt_einsum"},
    "pyro-ppl": {"pyro"},
    "pytorch-crf": {"torchcrf"},
    "tfp-nightly": {"tensorflow_probability"},
    "torch-struct": {"torch_struct"},
}
# A page about GPUs: the same code on the CPU.
ON_CPU = {'"cuda"': '"cpu"', "import cupy as cp": "import numpy as cp"}


def imported(example):
    """Return the names of the libraries that an example imports."""
    names = set()
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def installed(page):
    """Return the names of the libraries that a page says to install."""
    result = set(PROVIDES["."])
    for line in re.findall(r"pip install\s+([^`#\n]*)", page.read_text("utf-8")):
        for word in re.findall(r"[\w-]+", line):
            result |= {word, *PROVIDES.get(word, ())}
    return result


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_example_runs(page, example, monkeypatch, capsys):
    """In a namespace of its own, and prints what the page shows below."""
    shown = re.match(
        r"```\n\n```text\n(.*?)```", page.read_text("utf-8").partition(example)[2], re.S
    )
    libraries = imported(example)
    for old, new in ON_CPU.items() if page.name == "gpu.md" else ():
        example = example.replace(old, new)
    with warnings.catch_warnings():
        if not libraries.isdisjoint(PEERS):
            warnings.simplefilter("ignore")  # theirs
        for library in libraries.intersection(("dask", "matplotlib", "torch", *PEERS)):
            import_or_skip(library)
        if "torch.cuda." in example and not import_or_skip("torch").cuda.is_available():
            pytest.skip("there is no CUDA device")
        if "matplotlib" in libraries:
            plt = import_or_skip("matplotlib.pyplot")
            plt.switch_backend("agg")
            monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
        exec(compile(example, name_of(page), "exec"), {})
    assert shown is None or capsys.readouterr().out == shown[1]


M_STEPS = {
    "recipes.md": lambda page: "\n".join(fences(page)),
    "tutorials/hmm.md": cells,
    "tutorials/vowels.md": cells,
    "../examples/hmm.py": lambda path: path.read_text("utf-8"),
    "../examples/em_out_of_core.py": lambda path: path.read_text("utf-8"),
}


@pytest.mark.parametrize("name", M_STEPS)
def test_m_step_with_unvisited_state_keeps_its_row(name):
    tree = ast.parse(M_STEPS[name](DOCS / name))
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    shown = [x for x in functions if x.name in ("divide", "normalized")]
    namespace = {"np": np}
    exec(compile(ast.Module(shown, []), name, "exec"), namespace)

    x = np.log([[0.5, 0.2, 0.1], [0.1, 0.7, 0.1], [0.6, 0.3, 0.1], [0.2, 0.2, 0.1]])
    transitions = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])
    initial = np.array([0.5, 0.5, 0.0])  # nothing leads to state 2
    history = []
    for _ in range(3):
        chain = alc.LogChain(x, transitions=transitions, initial=initial)
        log_z, marginals, counts = chain.posterior()
        history.append(log_z)
        initial = namespace["normalized"](marginals[0], initial)
        transitions = namespace["normalized"](counts, transitions)
    assert np.all(np.diff(history) > 0)
    np.testing.assert_array_equal(transitions[2], [0.3, 0.3, 0.4])


def test_front_page_log_likelihoods_are_log_densities(capsys):
    namespace = {}
    exec(cells(DOCS / "index.md").partition("import matplotlib")[0], namespace)
    states = [NormalDist(*x) for x in zip(namespace["means"], namespace["widths"], strict=True)]
    densities = [[state.pdf(x) for state in states] for x in namespace["observed"]]
    np.testing.assert_allclose(np.exp(namespace["log_likelihoods"]), densities)
    weights = np.array([0.5, 0.5]) * densities[0]
    for density in densities[1:]:
        weights = weights @ namespace["transitions"] * density
    assert f"log-likelihood: {np.log(weights.sum()):.2f}\n" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_says_what_to_install(page):
    needed = set().union(*map(imported, [*fences(page), cells(page)]))
    assert needed - set(sys.stdlib_module_names) <= installed(page)


@pytest.mark.parametrize(
    "name",
    [
        *(n for n in alc.__all__ if n not in ("vjp", "__version__")),
        *(f"arraylogchain.vjp.{n}" for n in alc.vjp.__all__),
        *(n for n in vars(alc.LogChain) if not n.startswith("_")),
    ],
)
def test_reference_lists(name):
    assert re.search(rf"\b{re.escape(name)}\b", (DOCS / "api.rst").read_text("utf-8"))


@pytest.mark.parametrize(
    ("page", "folder"),
    [("CONTRIBUTING.md", "arraylogchain"), ("docs/algebra.md", "arraylogchain/_chains")],
)
def test_layout_lists_every_file(page, folder):
    """With folders, and nothing that is not there."""
    root = DOCS.parent
    text = (root / page).read_text("utf-8").partition("| in `arraylogchain/` | |")[2]
    rows = text.partition("\n\n")[0].splitlines()
    listed = {
        PurePosixPath(name).name
        for row in rows
        for name in re.findall(r"`([\w/.]+)`", row.partition("| ")[2].partition(" |")[0])
    }
    ignored = {"__init__.py", "__pycache__", "py.typed"}
    assert {path.name for path in (root / folder).iterdir()} - listed <= ignored
    assert listed - {path.name for path in (root / "arraylogchain").rglob("*")} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]*)[^)]*\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
