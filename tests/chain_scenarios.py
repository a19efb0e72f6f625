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

# Shapes of potentials, transitions and initial weights, and lengths: they broadcast in every way.
SHAPES: list[tuple] = [
    ((6, 4), (5, 4, 4), None, None),
    ((6, 4), (4, 4), (4,), None),
    ((6, 4), (1, 4, 4), (4,), 4),
    ((3, 6, 4), (5, 4, 4), (4,), None),
    ((3, 6, 4), (1, 4, 4), (3, 4), None),
    ((3, 6, 4), (3, 5, 4, 4), (4,), None),
    ((3, 6, 4), (3, 1, 4, 4), (3, 4), None),
    ((3, 6, 4), (1, 5, 4, 4), (1, 4), None),
    ((1, 6, 4), (3, 5, 4, 4), (4,), None),
    ((2, 1, 6, 4), (3, 5, 4, 4), (4,), None),
    ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4), None),
    ((6, 4), (3, 5, 4, 4), (2, 1, 4), None),
    ((6, 4), (5, 4, 4), (7, 4), None),
    ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4), None),
    ((2, 1, 4), (1, 4, 4), (4,), None),
    ((2, 1, 4), (0, 4, 4), (4,), None),
    ((2, 1, 4), None, (4,), None),
    ((2, 2, 4), (1, 4, 4), (4,), None),
    ((6, 1), (5, 1, 1), (1,), None),
    ((0, 6, 4), (5, 4, 4), (4,), None),
    ((5, 6, 4), (5, 4, 4), (4,), [1, 6, 3, 2, 5]),
    ((5, 6, 4), (4, 4), (5, 4), [4, 6, 1, 6, 2]),
    ((3, 6, 4), (3, 5, 4, 4), (4,), [5, 1, 3]),
    ((3, 6, 4), (3, 1, 4, 4), (3, 4), [1, 2, 6]),
    ((1, 6, 4), (3, 5, 4, 4), (4,), [2, 3, 4]),
    ((6, 4), (3, 5, 4, 4), None, [6, 1, 2]),
    ((6, 4), (5, 4, 4), (4, 4), [3, 1, 6, 3]),
    ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4), [[1, 2, 3], [6, 5, 4]]),
    ((2, 3, 6, 4), (3, 5, 4, 4), (4,), [[4], [2]]),
    ((2, 3, 6, 4), (5, 4, 4), None, 3),
    ((3, 6, 4), (3, 5, 4, 4), None, [1, 1, 1]),
    ((2, 1, 4), (1, 4, 4), (4,), [1, 1]),
    ((2, 3, 6, 4), (1, 3, 5, 4, 4), (1, 3, 4), None),
    ((6, 4), (1, 5, 4, 4), (1, 4), None),
]


def normal(*shape: int, sd: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sd, shape)


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def given_as(form: str, transitions: Any = None, initial: Any = None, final: Any = None) -> Options:
    """Return the options that give weights in linear space or as logs; "mixed" takes turns."""
    options = {}
    weights = {"transitions": transitions, "initial": initial, "final": final}
    for name, arguments in weights.items():
        is_log = form == "logs" or (form == "mixed" and name == "initial")
        if arguments is not None:
            with np.errstate(divide="ignore"):
                options[f"log_{name}" if is_log else name] = (
                    np.log(arguments) if is_log else arguments
                )
    return options


def random_shapes(form: str, x: tuple, transitions: Any, initial: Any, lengths: Any) -> Options:
    P, p0 = (None if s is None else uniform(*s, seed=1) for s in (transitions, initial))
    return {"x": normal(*x), "lengths": lengths, **given_as(form, P, p0)}


def random_range(form: str, sd: float) -> Options:
    weights = given_as(form, uniform(11, 9, 9), uniform(9), uniform(9))
    return {"x": normal(4, 12, 9, sd=sd), **weights}


def wide_weights(sd: float, steps: int) -> Options:
    """Return logs of weights of many magnitudes, one of them closed."""
    logs = normal(steps, 6, 6, sd=sd)
    logs[:, 2, 3] = -INF
    return {"x": normal(3, 10, 6), "log_transitions": logs, "log_initial": normal(6, sd=sd)}


def decades(n: float) -> Options:
    """Return linear weights of many magnitudes: they need no normalisation."""
    rng = np.random.default_rng(8)
    P, p0, end = (10.0 ** rng.uniform(-n, n, s) for s in ((9, 6, 6), 6, (3, 6)))
    return {"x": normal(3, 10, 6), "transitions": P, "initial": p0, "final": end}


def closed(logs: float) -> Options:
    """Return a chain whose closed transitions are written as very unlikely; a row needs one."""
    log_P = normal(1, 9, 9)
    log_P[0, np.tri(9, k=-1, dtype=bool)] = logs
    x = normal(3, 12, 9, sd=5)
    x[1, 5, 5:] = -INF
    start = np.where(np.arange(9) == 8, 0.0, np.array([[0.0], [-INF], [0.0]]))
    return {"x": x, "log_transitions": log_P, "log_initial": start}


def magnitudes(kind: str) -> Options:
    x = np.round(normal(2, 40, 5, sd=3), 1)
    if kind == "any":
        rng = np.random.default_rng(7)
        x = rng.normal(size=(4, 6, 5)) * 10.0 ** rng.integers(-20, 15, (4, 6, 5))
    else:
        x[:, ::2] += {"up": 1e4, "down": -1e4, "alternating": 1e4}[kind]
        x[:, 1::2] += {"up": 1e4, "down": -1e4, "alternating": -1e4}[kind]
    return {"x": x, "transitions": uniform(x.shape[1] - 1, 5, 5)}


def sparse(form: str, sd: float, steps: int) -> Options:
    """Return a chain with most edges closed, some states closed, and a row without a path."""
    rng = np.random.default_rng(9)
    P = uniform(steps, 7, 7) * (rng.random((steps, 7, 7)) < 0.4)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3, 5] = -INF
    return {"x": x, **given_as(form, P, uniform(7) * (np.arange(7) > 2))}


def band(form: str, K: int, width: int, sd: float = 3) -> Options:
    rows, columns = np.indices((K, K))
    P = uniform(1, K, K) * ((columns >= rows) & (columns < rows + width))
    return {"x": normal(3, min(2 * K, 1600 // K), K, sd=sd), **given_as(form, P, np.eye(K)[0])}


def detour(form: str, log_ratio: float) -> Options:
    """Return a chain whose only path that ends well falls behind a trap by exp(log_ratio)."""
    K = 9
    x = np.zeros((K, K))
    x[1:-1, 1:] = log_ratio / (K - 2)
    x[-1, :-1] = -INF
    return {"x": x, **given_as(form, 0.5 * (np.eye(K) + np.eye(K, k=1))[None], np.eye(K)[0])}


def nowhere(form: str, depth: float) -> Options:
    """Return rows whose likeliest last state nothing leads to: all paths lie so far below it."""
    x = np.array([[[0.0, 0.0], [-depth, 0.0]]] * 2)
    return {"x": x, **given_as(form, np.diag([1.0, 0.0])[None])}


def two_groups(form: str) -> Options:
    """Return two separate groups of states, one 1200 nats below, and in a row only it ends well."""
    x = normal(2, 60, 4)
    x[:, :30, 2:] -= 40.0
    x[0, -1, :2] = -INF
    return {"x": x, **given_as(form, np.kron(np.eye(2), np.full((2, 2), 0.5))[None])}


def hole() -> Options:
    """Return two states without a way between: what is lost early forward and late backward
    decides in between, log Z being -2700."""
    first, second = [0.0] * 3 + [-130] * 23 + [0] * 3, [-450.0] * 3 + [0] * 23 + [-450] * 3
    return {"x": np.array([[first, second]]).swapaxes(1, 2), "transitions": np.eye(2)[None]}


def falling(step: int, first: float, depths: np.ndarray) -> Options:
    """Return rows whose only weight that leads on falls twice; another is above it, and ends."""
    x = np.zeros((len(depths), 4, 2))
    x[:, step, 1], x[:, step + 1, 1] = -first, -depths
    return {"x": x, "transitions": np.array([[0.0, 0.0], [0.0, 1.0]])}


def hardly_numbers() -> Options:
    """Return rows whose linear weights would lose their last digits, and then decide alone."""
    x = np.zeros((27, 4, 2))
    x[:, 1, 0], x[:, 2, 0] = -690.0, np.linspace(-100.0, -220.0, 27)
    x[:, 3, 1] = -INF
    return {"x": x, "transitions": np.eye(2)[None]}


def small_entry() -> Options:
    """Return rows in which a product with one small entry would vanish, and then decides alone."""
    x, P = np.zeros((9, 8, 3)), np.tile(np.eye(3), (7, 1, 1))
    x[:, 1, 0], x[:, 2, 0], x[:, 3:, 0] = -690.0, np.linspace(-30.0, -70.0, 9), -INF
    x[:, :3, 1], x[:, 4:, 2] = -INF, -400.0
    P[2, 0, 1] = 1e-30
    return {"x": x, "transitions": P}


def unreached() -> Options:
    """Return weights of 0 into states that nothing reaches: derivatives by them are not 0."""
    P = np.array([[0.6, 0.4, 0], [0, 0.7, 0.3], [0, 0, 1.0]])
    return {"x": normal(3, 7, 3), "transitions": P, "initial": np.eye(3)[0], "final": np.eye(3)[1]}


def zero_beside_wide() -> Options:
    """Return weights of 0 between states that no present path shows beside the others."""
    K = 64
    x, P = np.full((K, 2, K), -88.0), np.full((K, K), 0.5)
    x[:, :, 1], P[1] = 0, 0
    return {"x": x, "transitions": P}


def rows_of_all_ranges(form: str, sd: float) -> Options:
    """Return rows of all ranges side by side, some ending before they are wide."""
    x = normal(6, 9, 5) * np.array([1, sd, 1, sd, sd, 1])[:, None, None]
    x[5, 3:, 2] = -INF
    return {
        "x": x,
        "lengths": [9, 9, 5, 7, 1, 4],
        **given_as(form, uniform(8, 5, 5), uniform(5), uniform(6, 5)),
    }


def rows_that_turn_wide(form: str, sd: float) -> Options:
    n, T, K, rng = 12, 60, 4, np.random.default_rng(3)
    wide = np.arange(T) >= rng.integers(0, T, n)[:, None]
    P = uniform(T - 1, K, K, seed=1) * (rng.random((T - 1, K, K)) > 0.3)
    lengths = rng.integers(1, T + 1, n)
    return {
        "x": normal(n, T, K) * np.where(wide, sd, 1)[..., None],
        "lengths": lengths,
        **given_as(form, P),
    }


def without_a_path() -> Options:
    """Return rows that a closed step ends only if they get there."""
    x, P = normal(4, 6, 4), uniform(5, 4, 4)
    x[:2, 3], P[4] = -INF, 0
    return {"x": x, "transitions": P, "lengths": [6, 3, 6, 5]}


def many_rows(form: str, batch: tuple, matrix_batch: tuple) -> Options:
    """Return rows enough to be computed side by side, of groups that share their matrices."""
    x, P = normal(*batch, 7, 5, sd=3), uniform(*matrix_batch, 5, 5)
    x[np.random.default_rng(0).random(x.shape) < 0.1] = -INF
    P[..., 1, 2:] = 0
    return {"x": x, **given_as(form, P, uniform(*batch, 5))}


def drifting_apart(steps: int, size: float) -> Options:
    """Return a left-to-right chain whose states drift apart and come back."""
    rng, K, T = np.random.default_rng(0), 12, 200
    x = rng.normal(size=(2, T, K)) + np.linspace(0, 5, K)
    x[1, :, 3:] += np.linspace(0, 60, K - 3)
    x[1, ::7, 4] = -INF
    P = size * np.triu(np.tril(rng.random((steps, K, K)), 2))
    return {"x": x, "transitions": P, "initial": np.eye(K)[0]}


def leaving_the_range() -> Options:
    """Return steps by 1e-30 and 1e30 whose products leave the range of numbers again and again."""
    rng = np.random.default_rng(1)
    P = rng.random((199, 3, 3)) * 10.0 ** rng.choice([-30, 0, 30], (199, 1, 1))
    return {"x": normal(9, 200, 3, sd=5), "transitions": P}


def final_weights(form: str, lengths: Any) -> Options:
    n = len(lengths or "few")
    end = uniform(n, 4)
    end[0, 1] = 0
    return {"x": normal(n, 6, 4), "lengths": lengths, **given_as(form, uniform(5, 4, 4), None, end)}


def opposite(magnitude: float) -> Options:
    logs = normal(40, 2, 2, seed=2)
    logs[::2] += magnitude
    logs[1::2] -= magnitude
    return {"x": np.zeros((41, 2)), "log_transitions": logs}


def below_unused_transitions() -> Options:
    """Return rows whose path lies far below the largest transition, which nothing reaches.

    What it lies below by is rounded twice, when it is subtracted and when it is added.
    """
    x, edges = normal(1000, 2, 2), np.full((1000, 1, 2, 2), 8200.0)
    edges[:, :, 0] = np.stack([normal(1000, 1, seed=1), np.full((1000, 1), -INF)], -1)
    x[:, 0, 1] = -INF
    return {"x": x, "log_transitions": edges}


def special(form: str, part: str, value: float) -> Options:
    """Return a row with an infinity or NaN: it shows where it took part, and only there."""
    x, P, p0 = normal(3, 6, 4), uniform(3, 5, 4, 4) + 0.01, uniform(3, 4)
    options = {"x": x, **given_as(form, P, p0)}
    name = "x" if part == "x" else part if form == "linear" else f"log_{part}"
    options[name][{"x": (1, 2, 3), "transitions": (1, 1, 0, 1), "initial": (1, 2)}[part]] = value
    return options


def infinite_for_one(form: str, steps: int) -> Options:
    """Return matrices of all rows, an entry of which is infinite: one row is long enough for it."""
    P = uniform(steps, 4, 4) + 0.01
    P[-1, 1, 2] = INF
    lengths = [6, 5, 3, 1] if steps > 1 else [6, 1, 1, 1]
    return {"x": normal(4, 6, 4), "lengths": lengths, **given_as(form, P)}


def cut_into_shards(form: str, sd: float, lengths: bool) -> Options:
    """Return a chain that does not fit its workspace, neither its rows nor its steps."""
    rng = np.random.default_rng(4)
    x = normal(64, 100, 12, sd=sd)
    return {
        "x": x,
        "workspace": 1 << 20,
        "lengths": rng.integers(1, 101, 64) if lengths else None,
        **given_as(form, uniform(12, 12), uniform(12), uniform(12)),
    }


# What is special of a form is tried in both; some numbers float32 does not hold.
ONLY_FLOAT64 = (
    "falling twice",
    "tiny weights",
    "unlikely start",
    "through subnormal",
    "hardly",
    "small entry",
    "ends all tiny 1e-300",
)


def scenarios() -> Iterator[tuple[str, Callable[..., Options], tuple]]:
    """Yield names, functions that make the arguments of `check_chain`, and their arguments."""
    for i, shapes in enumerate(SHAPES):
        for form in FORMS:
            yield f"shape {i} {form}", random_shapes, (form, *shapes)
    for form in ("linear", "logs", "mixed"):
        for T in (1, 2, 3, 9):
            yield f"{T} steps {form}", random_shapes, (form, (3, T, 3), (T - 1, 3, 3), (3,), None)
        for sd in (5, 30, 1000) if form == "mixed" else (15, 20, 30, 100, 1000):
            yield f"sd {sd} {form}", random_range, (form, sd)
    for form in FORMS:
        for sd, steps in ((1, 1), (1, 11), (30, 11), (1000, 1)):
            yield f"sparse {sd} {steps} {form}", sparse, (form, sd, steps)
        for K, width in ((5, 1), (10, 2), (40, 2), (130, 3)):
            yield f"band {K} {width} {form}", band, (form, K, width)
        yield f"band wide {form}", band, (form, 10, 2, 300)
        for ratio in (-30, -100, -300, -690, -1500, -1e5):
            yield f"detour {ratio} {form}", detour, (form, ratio)
        for depth in (95, 200, 720, 1500):
            yield f"nowhere {depth} {form}", nowhere, (form, depth)
        yield f"two groups {form}", two_groups, (form,)
        for sd in (20, 1000):
            yield f"rows of all ranges {sd} {form}", rows_of_all_ranges, (form, sd)
        for sd in (40, 400):
            yield f"rows that turn wide {sd} {form}", rows_that_turn_wide, (form, sd)
        for batch, matrix_batch in (((19,), (6,)), ((300,), (1,)), ((2, 9), (2, 1, 6))):
            yield f"many rows {batch} {matrix_batch} {form}", many_rows, (form, batch, matrix_batch)
        for i, lengths in enumerate((None, [6, 2, 1], [6, 2, 1, 6, 5, 4, 3, 2, 1])):
            yield f"final {i} {form}", final_weights, (form, lengths)
        for sd in (1, 300):
            yield f"pieces {sd} {form}", cut_into_shards, (form, sd, sd == 300)
    yield "pieces ragged", cut_into_shards, ("linear", 1, True)
    for sd in (1, 20, 100, 1000):
        for steps in (1, 9):
            yield f"wide weights {sd} {steps}", wide_weights, (sd, steps)
    for n in (5, 15, 30):
        yield f"decades {n}", decades, (n,)
    for logs in (-1e4, -720.0, -INF):
        yield f"closed {logs}", closed, (logs,)
    for kind in ("up", "down", "alternating", "any"):
        yield f"magnitude {kind}", magnitudes, (kind,)
    for garbage in (INF, -INF):
        options = random_shapes("linear", *SHAPES[20])
        yield f"garbage {garbage}", dict, ({**options, "garbage": garbage},)
    yield "hole", hole, ()
    yield "unreached", unreached, ()
    closed_edges = {"x": np.zeros((2, 2)), "transitions": np.eye(2)[None], "initial": np.eye(2)[0]}
    yield "closed edges", dict, (closed_edges,)
    yield "zero beside wide", zero_beside_wide, ()
    yield "through subnormal", falling, (0, 200, np.linspace(480, 700, 23))
    yield "falling twice", falling, (1, 615, 310 + np.arange(46))
    yield "hardly numbers", hardly_numbers, ()
    yield "small entry", small_entry, ()
    for ratio in (1e-30, 1e-150, 1e-300):
        P = np.array([[0.3, 0.7, 0], [0.6, 0.4, 0], [0, 0, 1.0]])
        x = np.concatenate([normal(5, 3), [[-INF, -INF, 0]]])
        options = {"x": x, "transitions": P, "initial": np.array([1, 1, ratio])}
        yield f"unlikely start {ratio}", dict, (options,)
    L = np.array([[0, -737.6], [-INF, -48.5]])
    options = {"x": np.array([[0, -690], [0, 730.3]]), "log_transitions": L}
    yield "a small share from hardly a number", dict, (options,)
    tiny = {"x": 700 + normal(2, 30, 3), "transitions": 1e-310 * (1 + uniform(3, 3))}
    yield "tiny weights", dict, (tiny,)
    yield "identity", lambda: {"x": normal(100, 5, sd=20), "transitions": np.eye(5)}, ()
    yield "without a path", without_a_path, ()
    yield "below unused transitions", below_unused_transitions, ()
    for steps, size in ((1, 1.0), (1, 1e-31), (199, 1.0)):
        yield f"drifting apart {steps} {size}", drifting_apart, (steps, size)
    yield "leaving the range", leaving_the_range, ()
    for magnitude in (1e3, 1e6):
        yield f"opposite {magnitude}", opposite, (magnitude,)
    # Of sums beyond 2**53, what a step adds is the difference of two that are rounded.
    but_filtered = ("log_partition", "messages", "posterior", "gradients", "entropy", "paths")
    options = {"x": normal(2, 9, 3, sd=1e17), "transitions": uniform(3, 3), "only": but_filtered}
    yield "beyond 2**53", dict, (options,)
    L = np.array([[0, -INF], [-INF, -1e19]])
    options = {"x": np.array([[-INF, 0], [0, -1e3]]), "log_transitions": L}
    yield "a step beyond 2**53", dict, (options,)
    x, L = np.array([-0.6946844957819215, 112.39440570968451]), np.array([[0, -INF], [-INF, 0]])
    options = {"x": np.tile(x, (800, 1)), "log_transitions": L, "log_initial": L[0]}
    yield "falling by each step", dict, (options | {"only": ("paths",)},)
    x = 3e15 + np.round(normal(2, 9, 3))
    yield "growing beyond 2**53", dict, ({"x": x, "transitions": uniform(3, 3)},)
    for form in FORMS:
        options = {"x": x, **given_as(form, np.exp(normal(8, 3, 3, sd=20)))}
        yield f"growing beyond 2**53, wide {form}", dict, (options,)
    boundaries = {"log_initial": normal(4) - 3000, "log_final": normal(4, seed=1) + 500}
    far = {"x": normal(3, 6, 4), "log_transitions": normal(4, 4) + 700, **boundaries}
    yield "ends far from 0", dict, (far,)
    for size in (1e-37, 1e-300):
        boundaries = {"initial": uniform(5, 3) * size, "final": uniform(5, 3) / size}
        yield f"ends all tiny {size}", dict, ({"x": normal(5, 1, 3), **boundaries},)
    x, L = np.zeros((4, 2)), np.array([[[0.0, -1.0], [-INF, w]] for w in (-360.0, -370.0, -30.0)])
    x[0, 1] = -INF
    yield "far below the others backward", dict, ({"x": x, "log_transitions": L},)
    L = np.full((3, 3), -720.0)
    L[:, 0] = -INF
    yield "column without edges", dict, ({"x": np.zeros((4, 3)), "log_transitions": L},)
    yield "ties", lambda: {"x": np.zeros((2, 9, 4)), "transitions": np.ones((4, 4))}, ()
    for form in FORMS:
        for steps in (1, 5):
            yield f"infinite for one row {steps} {form}", infinite_for_one, (form, steps)
        for part in ("x", "transitions", "initial"):
            for value in (INF, NAN):
                yield f"special {part} {value} {form}", special, (form, part, value)


SCENARIOS = {name: (make, args) for name, make, args in scenarios()}


def make(name: str) -> Options:
    """Return the arguments of `check_chain` for a scenario."""
    function, args = SCENARIOS[name]
    return function(*args)
