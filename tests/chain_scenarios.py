"""The table of chains: every operation of each runs on every backend, see test_chain_table.py.

To add one, add a line to `scenarios`: a name, and the arguments of `check_chain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

INF, NAN = np.inf, np.nan
FORMS = ("linear", "logs")
Options = dict[str, Any]
# A name, a function that makes the arguments of `check_chain`, and its arguments.
Scenario = tuple[str, Callable[..., Options], tuple]

# Shapes of potentials, transitions and initial weights, and lengths. A shared matrix has a time
# axis of size 1, a plain one has none.
SHAPES: dict[str, tuple] = {
    "one row": ((6, 4), (5, 4, 4), None, None),
    "one row, plain matrix": ((6, 4), (4, 4), (4,), None),
    "one short row, shared matrix": ((6, 4), (1, 4, 4), (4,), 4),
    "rows share matrices": ((3, 6, 4), (5, 4, 4), (4,), None),
    "shared matrix": ((3, 6, 4), (1, 4, 4), (3, 4), None),
    "matrices of each row": ((3, 6, 4), (3, 5, 4, 4), (4,), None),
    "one matrix for each row": ((3, 6, 4), (3, 1, 4, 4), (3, 4), None),
    "weights with a batch axis of 1": ((3, 6, 4), (1, 5, 4, 4), (1, 4), None),
    "rows share potentials": ((1, 6, 4), (3, 5, 4, 4), (4,), None),
    "two batch axes, rows share potentials": ((2, 1, 6, 4), (3, 5, 4, 4), (4,), None),
    "two batch axes, matrices along one": ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4), None),
    "batch axes of weights alone": ((6, 4), (3, 5, 4, 4), (2, 1, 4), None),
    "batch axis of initial weights alone": ((6, 4), (5, 4, 4), (7, 4), None),
    "two batch axes, matrices along the first": ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4), None),
    "one step, shared matrix": ((2, 1, 4), (1, 4, 4), (4,), None),
    "one step, no matrix": ((2, 1, 4), (0, 4, 4), (4,), None),
    "one step, transitions omitted": ((2, 1, 4), None, (4,), None),
    "two steps": ((2, 2, 4), (1, 4, 4), (4,), None),
    "one state": ((6, 1), (5, 1, 1), (1,), None),
    "no rows": ((0, 6, 4), (5, 4, 4), (4,), None),
    "ragged, rows share matrices": ((5, 6, 4), (5, 4, 4), (4,), [1, 6, 3, 2, 5]),
    "ragged, plain matrix": ((5, 6, 4), (4, 4), (5, 4), [4, 6, 1, 6, 2]),
    "ragged, matrices of each row": ((3, 6, 4), (3, 5, 4, 4), (4,), [5, 1, 3]),
    "ragged, one matrix for each row": ((3, 6, 4), (3, 1, 4, 4), (3, 4), [1, 2, 6]),
    "ragged, rows share potentials": ((1, 6, 4), (3, 5, 4, 4), (4,), [2, 3, 4]),
    "ragged, batch axis of matrices alone": ((6, 4), (3, 5, 4, 4), None, [6, 1, 2]),
    "ragged, batch axis of initial weights alone": ((6, 4), (5, 4, 4), (4, 4), [3, 1, 6, 3]),
    "ragged, two batch axes": ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4), [[1, 2, 3], [6, 5, 4]]),
    "ragged, lengths along one batch axis": ((2, 3, 6, 4), (3, 5, 4, 4), (4,), [[4], [2]]),
    "one length for all rows": ((2, 3, 6, 4), (5, 4, 4), None, 3),
    "one real step in each row": ((3, 6, 4), (3, 5, 4, 4), None, [1, 1, 1]),
    "one step, lengths": ((2, 1, 4), (1, 4, 4), (4,), [1, 1]),
    "two batch axes, matrices along the last": ((2, 3, 6, 4), (1, 3, 5, 4, 4), (1, 3, 4), None),
    "one row, weights with a batch axis of 1": ((6, 4), (1, 5, 4, 4), (1, 4), None),
}


def normal(*shape: int, sd: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sd, shape)


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def left_to_right(K: int) -> np.ndarray:
    return 0.5 * (np.eye(K) + np.eye(K, k=1))


def weights_as(
    form: str, transitions: Any = None, initial: Any = None, final: Any = None
) -> Options:
    """Return weights as options in linear space or as logs; "mixed" has logs of `initial` only."""
    options = {}
    weights = {"transitions": transitions, "initial": initial, "final": final}
    for name, array in weights.items():
        if array is None:
            continue
        if form == "logs" or (form == "mixed" and name == "initial"):
            with np.errstate(divide="ignore"):
                options[f"log_{name}"] = np.log(array)
        else:
            options[name] = array
    return options


def random_shapes(form: str, x: tuple, transitions: Any, initial: Any, lengths: Any) -> Options:
    P, p0 = (None if s is None else uniform(*s, seed=1) for s in (transitions, initial))
    return {"x": normal(*x), "lengths": lengths, **weights_as(form, P, p0)}


def random_range(form: str, sd: float) -> Options:
    weights = weights_as(form, uniform(11, 9, 9), uniform(9), uniform(9))
    return {"x": normal(4, 12, 9, sd=sd), **weights}


def wide_weights(sd: float, steps: int) -> Options:
    """Return logs of weights of many magnitudes, one of them -inf."""
    logs = normal(steps, 6, 6, sd=sd)
    logs[:, 2, 3] = -INF
    return {"x": normal(3, 10, 6), "log_transitions": logs, "log_initial": normal(6, sd=sd)}


def decades(n: float) -> Options:
    """Return linear weights of many magnitudes, without normalization."""
    rng = np.random.default_rng(8)
    P, p0, end = (10.0 ** rng.uniform(-n, n, s) for s in ((9, 6, 6), 6, (3, 6)))
    return {"x": normal(3, 10, 6), "transitions": P, "initial": p0, "final": end}


def closed(logs: float) -> Options:
    """Return a chain whose closed transitions are very unlikely instead; one row needs one."""
    log_P = normal(1, 9, 9)
    log_P[0, np.tri(9, k=-1, dtype=bool)] = logs
    x = normal(3, 12, 9, sd=5)
    x[1, 5, 5:] = -INF
    start = np.where(np.arange(9) == 8, 0.0, np.array([[0.0], [-INF], [0.0]]))
    return {"x": x, "log_transitions": log_P, "log_initial": start}


def one_large_matrix(form: str) -> Options:
    """Return a chain whose rows have a matrix each, of which that of the shortest is large."""
    P = uniform(3, 1, 4, 4, seed=1) * np.array([0.3, 5, 0.3])[:, None, None, None]
    return {"x": normal(3, 6, 4), "lengths": [6, 2, 4], **weights_as(form, P)}


def offset_potentials(even_offset: float, odd_offset: float) -> Options:
    """Return potentials with one offset at even steps and another at odd ones."""
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += even_offset
    x[:, 1::2] += odd_offset
    return {"x": x, "transitions": uniform(39, 5, 5)}


def all_magnitudes() -> Options:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(4, 6, 5)) * 10.0 ** rng.integers(-20, 15, (4, 6, 5))
    return {"x": x, "transitions": uniform(5, 5, 5)}


def sparse(form: str, sd: float, steps: int) -> Options:
    """Return a chain with most edges closed, some states closed, and a row without a path."""
    rng = np.random.default_rng(9)
    P = uniform(steps, 7, 7) * (rng.random((steps, 7, 7)) < 0.4)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3, 5] = -INF
    return {"x": x, **weights_as(form, P, uniform(7) * (np.arange(7) > 2))}


def band(form: str, K: int, width: int, sd: float = 3) -> Options:
    rows, columns = np.indices((K, K))
    P = uniform(1, K, K) * ((columns >= rows) & (columns < rows + width))
    return {"x": normal(3, min(2 * K, 1600 // K), K, sd=sd), **weights_as(form, P, np.eye(K)[0])}


def band_ragged(form: str, sd: float) -> Options:
    """Return ragged rows of a band, one of which has no path."""
    options = band(form, 20, 2, sd)
    options["x"] = normal(11, 30, 20, sd=sd)
    options["x"][6, 4] = -INF
    return {**options, "lengths": [30, 7, 30, 12, 25, 1, 9, 21, 30, 2, 16]}


def detour(form: str, log_ratio: float) -> Options:
    """Return a chain whose only feasible path is exp(log_ratio) times a dead end until it ends."""
    K = 9
    x = np.zeros((K, K))
    x[1:-1, 1:] = log_ratio / (K - 2)
    x[-1, :-1] = -INF
    return {"x": x, **weights_as(form, left_to_right(K)[None], np.eye(K)[0])}


def unreachable_mode(form: str, depth: float) -> Options:
    """Return rows whose largest last potential belongs to a state without an incoming path."""
    x = np.array([[[0.0, 0.0], [-depth, 0.0]]] * 2)
    return {"x": x, **weights_as(form, np.diag([1.0, 0.0])[None])}


def disconnected(form: str) -> Options:
    """Return two disconnected sets of states; in one row, only the unlikely one can end."""
    x = normal(2, 60, 4)
    x[:, :30, 2:] -= 40.0
    x[0, -1, :2] = -INF
    return {"x": x, **weights_as(form, np.kron(np.eye(2), np.full((2, 2), 0.5))[None])}


def hole() -> Options:
    """Return disconnected states whose deciding path underflows early forward and late backward.

    It decides in between, with a log Z of -2700.
    """
    first, second = [0.0] * 3 + [-130] * 23 + [0] * 3, [-450.0] * 3 + [0] * 23 + [-450] * 3
    return {"x": np.array([[first, second]]).swapaxes(1, 2), "transitions": np.eye(2)[None]}


def falling(step: int, first: float, depths: np.ndarray) -> Options:
    """Return rows whose only feasible state falls twice below a state that is a dead end."""
    x = np.zeros((len(depths), 4, 2))
    x[:, step, 1], x[:, step + 1, 1] = -first, -depths
    return {"x": x, "transitions": np.array([[0.0, 0.0], [0.0, 1.0]])}


def subnormal_weights() -> Options:
    """Return rows whose linear weights would become subnormal, and then decide alone."""
    x = np.zeros((27, 4, 2))
    x[:, 1, 0], x[:, 2, 0] = -690.0, np.linspace(-100.0, -220.0, 27)
    x[:, 3, 1] = -INF
    return {"x": x, "transitions": np.eye(2)[None]}


def small_entry() -> Options:
    """Return rows in which a product by a small entry would underflow, and then decides alone."""
    x, P = np.zeros((9, 8, 3)), np.tile(np.eye(3), (7, 1, 1))
    x[:, 1, 0], x[:, 2, 0], x[:, 3:, 0] = -690.0, np.linspace(-30.0, -70.0, 9), -INF
    x[:, :3, 1], x[:, 4:, 2] = -INF, -400.0
    P[2, 0, 1] = 1e-30
    return {"x": x, "transitions": P}


def unreached() -> Options:
    """Return weights of 0 into unreachable states: derivatives by them are not 0."""
    P = np.array([[0.6, 0.4, 0], [0, 0.7, 0.3], [0, 0, 1.0]])
    return {"x": normal(3, 7, 3), "transitions": P, "initial": np.eye(3)[0], "final": np.eye(3)[1]}


def zero_beside_wide() -> Options:
    """Return weights of 0 between states whose own weights are negligible on every path."""
    K = 64
    x, P = np.full((K, 2, K), -88.0), np.full((K, K), 0.5)
    x[:, :, 1], P[1] = 0, 0
    return {"x": x, "transitions": P}


def narrow_and_wide_rows(form: str, sd: float) -> Options:
    """Return rows of narrow and of wide range, of different lengths."""
    x = normal(6, 9, 5) * np.array([1, sd, 1, sd, sd, 1])[:, None, None]
    x[5, 3:, 2] = -INF
    return {
        "x": x,
        "lengths": [9, 9, 5, 7, 1, 4],
        **weights_as(form, uniform(8, 5, 5), uniform(5), uniform(6, 5)),
    }


def rows_that_widen(form: str, sd: float) -> Options:
    n, T, K, rng = 12, 60, 4, np.random.default_rng(3)
    wide = np.arange(T) >= rng.integers(0, T, n)[:, None]
    P = uniform(T - 1, K, K, seed=1) * (rng.random((T - 1, K, K)) > 0.3)
    lengths = rng.integers(1, T + 1, n)
    return {
        "x": normal(n, T, K) * np.where(wide, sd, 1)[..., None],
        "lengths": lengths,
        **weights_as(form, P),
    }


def without_a_path() -> Options:
    """Return rows without a path, but for those that end before a closed step."""
    x, P = normal(4, 6, 4), uniform(5, 4, 4)
    x[:2, 3], P[4] = -INF, 0
    return {"x": x, "transitions": P, "lengths": [6, 3, 6, 5]}


def many_rows(form: str, batch: tuple, matrix_batch: tuple) -> Options:
    """Return enough rows for vectorized steps, in groups that share their matrices."""
    x, P = normal(*batch, 7, 5, sd=3), uniform(*matrix_batch, 5, 5)
    x[np.random.default_rng(0).random(x.shape) < 0.1] = -INF
    P[..., 1, 2:] = 0
    return {"x": x, **weights_as(form, P, uniform(*batch, 5))}


def drifting_apart(steps: int, size: float) -> Options:
    """Return a left-to-right chain whose states' weights drift apart and come back."""
    rng, K, T = np.random.default_rng(0), 12, 200
    x = rng.normal(size=(2, T, K)) + np.linspace(0, 5, K)
    x[1, :, 3:] += np.linspace(0, 60, K - 3)
    x[1, ::7, 4] = -INF
    P = size * np.triu(np.tril(rng.random((steps, K, K)), 2))
    return {"x": x, "transitions": P, "initial": np.eye(K)[0]}


def leaving_the_range() -> Options:
    """Return matrices of 1e-30 to 1e30 whose products overflow and underflow repeatedly."""
    rng = np.random.default_rng(1)
    P = rng.random((199, 3, 3)) * 10.0 ** rng.choice([-30, 0, 30], (199, 1, 1))
    return {"x": normal(9, 200, 3, sd=5), "transitions": P}


def final_weights(form: str, lengths: Any) -> Options:
    n = 3 if lengths is None else len(lengths)
    end = uniform(n, 4)
    end[0, 1] = 0
    return {
        "x": normal(n, 6, 4),
        "lengths": lengths,
        **weights_as(form, uniform(5, 4, 4), None, end),
    }


def opposite(magnitude: float) -> Options:
    logs = normal(40, 2, 2, seed=2)
    logs[::2] += magnitude
    logs[1::2] -= magnitude
    return {"x": np.zeros((41, 2)), "log_transitions": logs}


SPECIAL_PLACES = {"x": (1, 2, 3), "transitions": (1, 1, 0, 1), "initial": (1, 2)}


def below_unused_transitions() -> Options:
    """Return rows whose path lies far below the largest transition, which no path uses.

    Their difference is rounded twice: when it is subtracted, and when it is added.
    """
    x, edges = normal(1000, 2, 2), np.full((1000, 1, 2, 2), 8200.0)
    edges[:, :, 0] = np.stack([normal(1000, 1, seed=1), np.full((1000, 1), -INF)], -1)
    x[:, 0, 1] = -INF
    return {"x": x, "log_transitions": edges}


def special(form: str, name: str, value: float) -> Options:
    """Return three rows, one with an infinity or NaN in one array."""
    x, P, p0 = normal(3, 6, 4), uniform(3, 5, 4, 4) + 0.01, uniform(3, 4)
    options = {"x": x, **weights_as(form, P, p0)}
    options[f"log_{name}" if form == "logs" and name != "x" else name][SPECIAL_PLACES[name]] = value
    return options


def infinite_for_one(form: str, steps: int) -> Options:
    """Return shared matrices with an infinite entry that only one row is long enough to read."""
    P = uniform(steps, 4, 4) + 0.01
    P[-1, 1, 2] = INF
    lengths = [6, 5, 3, 1] if steps > 1 else [6, 1, 1, 1]
    return {"x": normal(4, 6, 4), "lengths": lengths, **weights_as(form, P)}


def cut_into_shards(form: str, sd: float, lengths: bool) -> Options:
    """Return a chain whose rows and whose steps both exceed the workspace."""
    rng = np.random.default_rng(4)
    x = normal(64, 100, 12, sd=sd)
    return {
        "x": x,
        "workspace": 1 << 20,
        "lengths": rng.integers(1, 101, 64) if lengths else None,
        **weights_as(form, uniform(12, 12), uniform(12), uniform(12)),
    }


# Scenarios whose arrays need float64.
ONLY_FLOAT64 = (
    "falling twice",
    "subnormal transitions",
    "unlikely initial state",
    "falling through subnormals",
    "subnormal weights decide",
    "small entry",
    "initial weights of 1e-300",
)


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios; their order is that of the results' hash."""
    for name, shapes in SHAPES.items():
        for form in FORMS:
            yield f"{name}, {form}", random_shapes, (form, *shapes)
    for form in ("linear", "logs", "mixed"):
        for T in (1, 2, 3, 9):
            yield f"T = {T}, {form}", random_shapes, (form, (3, T, 3), (T - 1, 3, 3), (3,), None)
        for sd in (5, 30, 1000) if form == "mixed" else (15, 20, 30, 100, 1000):
            yield f"sd = {sd}, {form}", random_range, (form, sd)
    for form in FORMS:
        yield from scenarios_of_zeros(form)
        yield from scenarios_of_rows(form)
    shards = ("linear", 1, True)
    yield "shards and segments, ragged, sd = 1, linear", cut_into_shards, shards
    yield from scenarios_of_magnitudes()
    yield from scenarios_of_underflow()
    yield from scenarios_of_large_sums()
    yield from scenarios_of_boundaries()
    for form in FORMS:
        yield from scenarios_of_special_values(form)


def scenarios_of_zeros(form: str) -> Iterator[Scenario]:
    for sd, steps in ((1, 1), (1, 11), (30, 11), (1000, 1)):
        matrices = "shared matrix" if steps == 1 else "matrix for each step"
        yield f"sparse, {matrices}, sd = {sd}, {form}", sparse, (form, sd, steps)
    for K, width in ((5, 1), (10, 2), (40, 2), (130, 3)):
        yield f"band of {width}, K = {K}, {form}", band, (form, K, width)
    yield f"band of 2, sd = 300, {form}", band, (form, 10, 2, 300)
    for sd in (1, 300):
        yield f"band, ragged rows, sd = {sd}, {form}", band_ragged, (form, sd)
    for ratio in (-30, -100, -300, -690, -1500, -1e5):
        yield f"detour, log ratio = {ratio:g}, {form}", detour, (form, ratio)
    for depth in (95, 200, 720, 1500):
        yield f"unreachable mode, depth = {depth}, {form}", unreachable_mode, (form, depth)
    yield f"disconnected states, {form}", disconnected, (form,)


def scenarios_of_rows(form: str) -> Iterator[Scenario]:
    for sd in (20, 1000):
        yield f"narrow and wide rows, sd = {sd}, {form}", narrow_and_wide_rows, (form, sd)
    for sd in (40, 400):
        yield f"rows that widen, sd = {sd}, {form}", rows_that_widen, (form, sd)
    for name, batch, matrix_batch in (
        ("matrix for each step", (19,), (6,)),
        ("shared matrix", (300,), (1,)),
        ("two groups", (2, 9), (2, 1, 6)),
    ):
        yield f"many rows, {name}, {form}", many_rows, (form, batch, matrix_batch)
    yield f"one large matrix among those of rows, ragged, {form}", one_large_matrix, (form,)
    yield f"final weights, {form}", final_weights, (form, None)
    yield f"final weights, ragged, {form}", final_weights, (form, [6, 2, 1])
    lengths = [6, 2, 1, 6, 5, 4, 3, 2, 1]
    yield f"final weights, ragged, nine rows, {form}", final_weights, (form, lengths)
    yield f"shards and segments, sd = 1, {form}", cut_into_shards, (form, 1, False)
    yield f"shards and segments, ragged, sd = 300, {form}", cut_into_shards, (form, 300, True)


def scenarios_of_magnitudes() -> Iterator[Scenario]:
    for sd in (1, 20, 100, 1000):
        yield f"log weights of sd = {sd}, shared matrix", wide_weights, (sd, 1)
        yield f"log weights of sd = {sd}, matrix for each step", wide_weights, (sd, 9)
    for n in (5, 15, 30):
        yield f"weights from 1e-{n} to 1e{n}", decades, (n,)
    for logs in (-1e4, -720.0, -INF):
        yield f"closed transitions, log weight = {logs:g}", closed, (logs,)
    yield "potentials near 1e4", offset_potentials, (1e4, 1e4)
    yield "potentials near -1e4", offset_potentials, (-1e4, -1e4)
    yield "potentials near 1e4 and -1e4", offset_potentials, (1e4, -1e4)
    yield "potentials of all magnitudes", all_magnitudes, ()
    for garbage in (INF, -INF):
        options = random_shapes("linear", *SHAPES["ragged, rows share matrices"])
        yield f"{garbage} past the lengths", dict, ({**options, "garbage": garbage},)


def scenarios_of_underflow() -> Iterator[Scenario]:
    yield "hole, underflow from both ends", hole, ()
    yield "unreachable states", unreached, ()
    closed_edges = {"x": np.zeros((2, 2)), "transitions": np.eye(2)[None], "initial": np.eye(2)[0]}
    yield "zero weights of transitions and initial", dict, (closed_edges,)
    yield "zero weights beside wide potentials", zero_beside_wide, ()
    yield "falling through subnormals", falling, (0, 200, np.linspace(480, 700, 23))
    yield "falling twice", falling, (1, 615, 310 + np.arange(46))
    yield "subnormal weights decide", subnormal_weights, ()
    yield "small entry decides", small_entry, ()
    for ratio in (1e-30, 1e-150, 1e-300):
        P = np.array([[0.3, 0.7, 0], [0.6, 0.4, 0], [0, 0, 1.0]])
        x = np.concatenate([normal(5, 3), [[-INF, -INF, 0]]])
        options = {"x": x, "transitions": P, "initial": np.array([1, 1, ratio])}
        yield f"unlikely initial state, {ratio}", dict, (options,)
    L = np.array([[0, -737.6], [-INF, -48.5]])
    options = {"x": np.array([[0, -690], [0, 730.3]]), "log_transitions": L}
    yield "small marginal of a nearly subnormal weight", dict, (options,)
    tiny = {"x": 700 + normal(2, 30, 3), "transitions": 1e-310 * (1 + uniform(3, 3))}
    yield "subnormal transitions", dict, (tiny,)
    yield "identity", lambda: {"x": normal(100, 5, sd=20), "transitions": np.eye(5)}, ()
    yield "rows without a path", without_a_path, ()
    yield "below unused transitions", below_unused_transitions, ()
    yield "drifting apart, shared matrix", drifting_apart, (1, 1.0)
    yield "drifting apart, shared matrix of 1e-31", drifting_apart, (1, 1e-31)
    yield "drifting apart, matrix for each step", drifting_apart, (199, 1.0)
    yield "leaving the range", leaving_the_range, ()


def scenarios_of_large_sums() -> Iterator[Scenario]:
    for magnitude in (1e3, 1e6):
        yield f"log matrices near {magnitude:g} and {-magnitude:g}", opposite, (magnitude,)
    # Beyond 2**53, a log normalizer is the difference of two rounded sums.
    but_filtered = ("log_partition", "messages", "posterior", "gradients", "entropy", "paths")
    options = {"x": normal(2, 9, 3, sd=1e17), "transitions": uniform(3, 3), "only": but_filtered}
    yield "potentials beyond 2**53", dict, (options,)
    L = np.array([[0, -INF], [-INF, -1e19]])
    options = {"x": np.array([[-INF, 0], [0, -1e3]]), "log_transitions": L}
    yield "one weight beyond 2**53", dict, (options,)
    x, L = np.array([-0.6946844957819215, 112.39440570968451]), np.array([[0, -INF], [-INF, 0]])
    options = {"x": np.tile(x, (800, 1)), "log_transitions": L, "log_initial": L[0]}
    yield "falling at every step", dict, (options | {"only": ("paths",)},)
    x = 3e15 + np.round(normal(2, 9, 3))
    yield "sums beyond 2**53", dict, ({"x": x, "transitions": uniform(3, 3)},)
    for form in FORMS:
        options = {"x": x, **weights_as(form, np.exp(normal(8, 3, 3, sd=20)))}
        yield f"sums beyond 2**53, wide weights, {form}", dict, (options,)


def scenarios_of_boundaries() -> Iterator[Scenario]:
    boundaries = {"log_initial": normal(4) - 3000, "log_final": normal(4, seed=1) + 500}
    far = {"x": normal(3, 6, 4), "log_transitions": normal(4, 4) + 700, **boundaries}
    yield "all log weights far from 0", dict, (far,)
    for size in (1e-37, 1e-300):
        boundaries = {"initial": uniform(5, 3) * size, "final": uniform(5, 3) / size}
        yield f"initial weights of {size}", dict, ({"x": normal(5, 1, 3), **boundaries},)
    x, L = np.zeros((4, 2)), np.array([[[0.0, -1.0], [-INF, w]] for w in (-360.0, -370.0, -30.0)])
    x[0, 1] = -INF
    yield "backward message far below the other", dict, ({"x": x, "log_transitions": L},)
    L = np.full((3, 3), -720.0)
    L[:, 0] = -INF
    yield "matrix with a column of zeros", dict, ({"x": np.zeros((4, 3)), "log_transitions": L},)
    yield "ties", lambda: {"x": np.zeros((2, 9, 4)), "transitions": np.ones((4, 4))}, ()


def scenarios_of_special_values(form: str) -> Iterator[Scenario]:
    yield f"infinite for one row, shared matrix, {form}", infinite_for_one, (form, 1)
    yield f"infinite for one row, matrix for each step, {form}", infinite_for_one, (form, 5)
    for name in SPECIAL_PLACES:
        for value in (INF, NAN):
            yield f"{value} in {name}, {form}", special, (form, name, value)


SCENARIOS = {name: (make, args) for name, make, args in scenarios()}


def make(name: str) -> Options:
    """Return the arguments of `check_chain` for a scenario."""
    function, args = SCENARIOS[name]
    return function(*args)
