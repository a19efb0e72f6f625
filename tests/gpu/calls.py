"""Calls of the library's functions, a few of each kind of work, for tests of how they behave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import arraylogchain as alc
from tests.conftest import Backend


@dataclass(frozen=True)
class Call:
    """A function of arrays that returns a tuple of arrays, and shapes to call it with.

    `linear` are the positions of weights in linear space, `sd` the spread of the others.
    """

    run: Callable[..., tuple[Any, ...]]
    shapes: tuple[tuple[int, ...], ...]
    linear: tuple[int, ...] = ()
    sd: float = 1.0

    def arguments(self, backend: Backend, dtype: str = "float32", seed: int = 0) -> list[Any]:
        return [backend.asarray(x, dtype) for x in self.values(seed)]

    def values(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [
            rng.random(shape) if i in self.linear else rng.normal(0, self.sd, shape)
            for i, shape in enumerate(self.shapes)
        ]


def _outs(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _product(name: str, *shapes: tuple[int, ...], sd: float = 1.0) -> Call:
    return Call(lambda a, b: _outs(getattr(alc, name)(a, b)), shapes, sd=sd)


def _product_gradients(name: str, *shapes: tuple[int, ...], sd: float = 1.0) -> Call:
    def run(a: Any, b: Any) -> tuple[Any, ...]:
        value, pullback = getattr(alc.vjp, name)(a, b)
        out = _outs(value)[0]
        return out, *pullback(out)

    return Call(run, shapes, sd=sd)


def _chain(method: str, kind: str = "", sd: float = 1.0) -> Call:
    """Return a method, or ``gradients``, of a chain of a kind below."""
    shapes = _CHAINS.get(kind, _CHAINS[""])
    lengths = np.arange(shapes[0][0]) % shapes[0][1] + 1 if kind in ("lengths", "final") else None

    def run(x: Any, transitions: Any, initial: Any, final: Any = None) -> tuple[Any, ...]:
        chain = alc.LogChain(
            x, transitions=transitions, initial=initial, final=final, lengths=lengths
        )
        if method == "sample":  # by numbers of the host, and their log weights
            states = chain.sample(3, rng=np.random.default_rng(0))
            return states, chain.log_weight(states)
        if method != "gradients":
            return _outs(getattr(chain, method)())
        value, pullback = alc.vjp.log_partition(chain)
        return value, *(x for x in pullback(value) if x is not None)

    return Call(run, shapes, tuple(range(1, len(shapes))), sd)


_SHAPES = (150, 96), (96, 130)
_SMALL = (900, 16, 16), (900, 16, 16)
_BROADCAST = (5, 1, 40, 50), (7, 50, 60)
_CHAINS: dict[str, tuple[tuple[int, ...], ...]] = {
    "": ((70, 12, 40), (11, 40, 40), (40,)),
    "final": ((70, 12, 40), (11, 40, 40), (40,), (70, 40)),
    "few states": ((300, 12, 6), (11, 6, 6), (6,)),
    "one matrix": ((3, 30, 9, 150), (1, 150, 150), (150,)),
}

CALLS = {
    "logmatmulexp": _product("logmatmulexp", *_SHAPES),
    "logmatmulexp, unproved": _product("logmatmulexp", *_SHAPES, sd=100),
    "logmatmulexp, thin": _product("logmatmulexp", (2, 300), (300, 200)),
    "logmatmulexp, small": _product("logmatmulexp", *_SMALL),
    "logmatmulexp, broadcast": _product("logmatmulexp", *_BROADCAST),
    "maxplus_matmul": _product("maxplus_matmul", *_SHAPES),
    "matmul": _product("matmul", *_BROADCAST),
    "logchainexp": Call(lambda stack: (alc.logchainexp(stack),), ((9, 30, 30),)),
    "gradients of logmatmulexp": _product_gradients("logmatmulexp", *_SHAPES),
    "gradients of logmatmulexp, unproved": _product_gradients("logmatmulexp", *_SHAPES, sd=100),
    "gradients of logmatmulexp, small": _product_gradients("logmatmulexp", *_SMALL, sd=30),
    "gradients of maxplus_matmul": _product_gradients("maxplus_matmul", *_SHAPES),
    "log_partition": _chain("log_partition"),
    "log_partition, unproved": _chain("log_partition", sd=100),
    "log_partition, one matrix": _chain("log_partition", "one matrix"),
    "log_partition, few states": _chain("log_partition", "few states", sd=100),
    "log_partition, lengths": _chain("log_partition", "lengths"),
    "forward_messages": _chain("forward_messages"),
    "backward_messages": _chain("backward_messages"),
    "marginals": _chain("marginals"),
    "marginals, lengths": _chain("marginals", "lengths"),
    "expected_transitions": _chain("expected_transitions"),
    "gradients of log_partition": _chain("gradients"),
    "gradients of log_partition, lengths": _chain("gradients", "lengths"),
    "gradients of log_partition, few states": _chain("gradients", "few states"),
    "gradients of log_partition, final": _chain("gradients", "final"),
    "viterbi": _chain("viterbi"),
    "viterbi, lengths": _chain("viterbi", "final"),
    "entropy": _chain("entropy"),
    "entropy, few states": _chain("entropy", "few states", sd=30),
    "filtered, lengths": _chain("filtered", "lengths"),
    "sample": _chain("sample", "final"),
}
# They only queue work, and depend on no numbers of the device; samples read those of the host.
WITHOUT_WAITING = [name for name in CALLS if name != "sample"]
