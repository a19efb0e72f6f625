"""Equations of einsum: what they mean for shapes, and in which order they are contracted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from arraylogchain._arrays import is_traced
from arraylogchain._context import Array, shape_of
from arraylogchain._fold import Shape

# Letters that stand for axes of an ellipsis begin here.
_ALPHA = 0x3B1

_TERM = re.compile(r"[A-Za-z]*(\.\.\.[A-Za-z]*)?")


class Contraction(NamedTuple):
    """A step: one operand is summed in its place, or two are replaced by one behind the others.

    `terms` are the indices of what goes in, in the order of `positions`, and `out` of the result.
    """

    positions: tuple[int, ...]
    terms: tuple[str, ...]
    out: str
    flops: int
    size: int  # entries of the result

    def __str__(self) -> str:
        return f"{','.join(self.terms)}->{self.out}"


class Contractions(NamedTuple):
    """What an equation means for operands of given shapes.

    `terms` are the indices of each operand, ellipses spelled out by Greek letters; `reduced` those
    that are left when axes that broadcast are dropped and repeated ones replaced by a diagonal.
    """

    terms: tuple[str, ...]
    reduced: tuple[str, ...]
    output: str
    sizes: Mapping[str, int]
    steps: tuple[Contraction, ...]


def contractions(equation: Any, operands: Sequence[Array], optimize: Any) -> Contractions:
    """Return the contractions of operands, of which only shapes are read."""
    if not isinstance(equation, str):
        kind = type(equation).__name__
        raise TypeError(f"equation must be a string such as 'ij,jk->ik', got {kind}")
    for i, x in enumerate(operands):
        if not hasattr(x, "shape"):
            raise TypeError(f"operands[{i}] must be an array, got {type(x).__name__}")
    if isinstance(optimize, (list, tuple)):
        optimize = tuple(map(tuple, optimize))
    if is_traced():
        # The compiler refuses caches, and traces lengths that are not known yet.
        return _contractions.__wrapped__(equation, tuple(x.shape for x in operands), optimize)
    return _contractions(equation, tuple(map(shape_of, operands)), optimize)


@lru_cache(maxsize=256)
def _contractions(equation: str, shapes: tuple[Shape, ...], optimize: Any) -> Contractions:
    terms, output = _parse(equation, shapes)
    sizes = _sizes(terms, shapes)
    reduced = tuple(
        "".join(dict.fromkeys(c for c, n in zip(term, shape, strict=True) if n == sizes[c]))
        for term, shape in zip(terms, shapes, strict=True)
    )
    left = list(reduced)
    steps: list[Contraction] = []

    def contract(*positions: int) -> None:
        taken = tuple(left[i] for i in positions)
        for i in reversed(positions):
            del left[i]
        kept = set(output).union(*left)
        indices = "".join(dict.fromkeys("".join(taken)))
        out = "".join(c for c in indices if c in kept)
        points, size = (math.prod([sizes[c] for c in x]) for x in (indices, out))
        flops = 2 * points if len(out) < len(indices) else points
        steps.append(Contraction(positions, taken, out, flops, size))
        left.insert(positions[0] if len(positions) == 1 else len(left), out)

    occurrences = Counter("".join((*reduced, output)))
    for i, term in enumerate(reduced):
        if any(occurrences[c] == 1 for c in term):
            contract(i)
    for pair in _pairs(left, output, sizes, optimize):
        contract(*pair)
    return Contractions(terms, reduced, output, sizes, tuple(steps))


def _parse(equation: str, shapes: tuple[Shape, ...]) -> tuple[tuple[str, ...], str]:
    """Return the indices of operands and output, with a letter for each axis of an ellipsis."""
    inputs, arrow, output = "".join(equation.split()).partition("->")
    given = inputs.split(",")
    if len(given) != len(shapes):
        raise ValueError(
            f"equation {equation!r} is for {len(given)} operands, and {len(shapes)} are given"
        )
    for term in (*given, output):
        if not _TERM.fullmatch(term):
            raise ValueError(
                f"equation {equation!r} has {term!r} in it; indices are letters, and '...' stands "
                "for others, once"
            )
    terms, most = [], 0
    for i, (term, shape) in enumerate(zip(given, shapes, strict=True)):
        letters = term.replace("...", "")
        rest = len(shape) - len(letters)
        if rest < 0 or (rest > 0 and letters == term):
            raise ValueError(
                f"operands[{i}] has shape {shape}, {len(shape)} axes, and its indices are {term!r}"
            )
        terms.append(term.replace("...", _ellipsis(rest)))
        most = max(most, rest)
    if not arrow:
        letters = "".join(terms)
        once = sorted(c for c in set(inputs) if c.isalpha() and letters.count(c) == 1)
        return tuple(terms), _ellipsis(most) + "".join(once)
    if most and "..." not in output:
        raise ValueError(f"equation {equation!r} lacks '...' in its output, where operands have it")
    output = output.replace("...", _ellipsis(most))
    for c, count in Counter(output).items():
        if count > 1 or not any(c in term for term in terms):
            fault = f"{count} times" if count > 1 else "which no operand has"
            raise ValueError(f"equation {equation!r} has index {c!r} in its output, {fault}")
    return tuple(terms), output


def _ellipsis(count: int) -> str:
    """Return letters for the axes of an ellipsis, which are aligned at the last one."""
    return "".join(chr(_ALPHA + i) for i in reversed(range(count)))


def _sizes(terms: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the length of each index; axes of length 1 broadcast."""
    sizes: dict[str, int] = {}
    owner: dict[str, int] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        for c, n in zip(term, shape, strict=True):
            repeated = {m for other, m in zip(term, shape, strict=True) if other == c}
            if len(repeated) > 1:
                raise ValueError(
                    f"operands[{i}] has shape {shape}, where index {c!r} stands for axes of "
                    f"different lengths: {sorted(repeated)}"
                )
            known = sizes.get(c, 1)
            if n not in (1, known) and known != 1:
                raise ValueError(
                    f"operands[{owner[c]}] of shape {shapes[owner[c]]} and operands[{i}] of shape "
                    f"{shape} do not fit: index {c!r} has lengths {known} and {n}"
                )
            if c not in sizes or n != 1:
                sizes[c], owner[c] = n, i
    return sizes


def _pairs(
    terms: Sequence[str], output: str, sizes: Mapping[str, int], optimize: Any
) -> Iterator[tuple[int, int]]:
    """Yield positions of what is contracted, in order; results are put behind all others."""
    if len(terms) <= 2:
        yield from [(0, 1)] * (len(terms) - 1)
        return
    if isinstance(optimize, tuple):
        path: Sequence[tuple[int, ...]] = optimize
    else:
        shapes = tuple([tuple([sizes[c] for c in term]) for term in terms])
        path = _path(f"{','.join(terms)}->{output}", shapes, optimize)
    count = len(terms)
    for group in path:
        # Of more than two, the first two, then the result with each of the others.
        for k, position in enumerate(sorted(group)):
            if k == 1:
                yield min(group), position
            elif k > 1:
                yield position - k, count - 1
            count -= k > 0
    yield from [(0, 1)] * (count - 1)


def _path(equation: str, shapes: Sequence[Shape], optimize: Any) -> list[tuple[int, ...]]:
    """Return which operands opt_einsum contracts, in order."""
    try:
        import opt_einsum
    except ImportError:
        raise ImportError(
            f"an equation of {len(shapes)} operands needs opt_einsum for their order; install the "
            "extra einsum, or give a path as optimize"
        ) from None
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize)
    return list(path)


# What the compiler takes for a constant, and does not trace.
_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
