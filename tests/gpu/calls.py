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


def _product(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def run(a: Any, b: Any) -> tuple[Any, ...]:
        out = function(a, b)
        return out if isinstance(out, tuple) else (out,)

    return run


def _product_gradients(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def run(a: Any, b: Any) -> tuple[Any, ...]:
        value, pullback = function(a, b)
        out = getattr(value, "values", value) if isinstance(value, tuple) else value
        return out, *pullback(out)

    return run


def _chain(method: str, **given: Any) -> Callable[..., tuple[Any, ...]]:
    def run(x: Any, transitions: Any, initial: Any, final: Any = None) -> tuple[Any, ...]:
        chain = alc.LogChain(x, transitions=transitions, initial=initial, final=final, **given)
        out = getattr(chain, method)()
        return out if isinstance(out, tuple) else (out,)

    return run


def _sample(x: Any, transitions: Any, initial: Any, final: Any) -> tuple[Any, ...]:
    """Samples by numbers of the host, and their log weights."""
    chain = alc.LogChain(x, transitions=transitions, initial=initial, final=final, **_LENGTHS)
    states = chain.sample(3, np.random.default_rng(0))
    return states, chain.log_weight(states)


def _chain_gradients(**given: Any) -> Callable[..., tuple[Any, ...]]:
    def run(x: Any, transitions: Any, initial: Any, final: Any = None) -> tuple[Any, ...]:
        chain = alc.LogChain(x, transitions=transitions, initial=initial, final=final, **given)
        value, pullback = alc.vjp.log_partition(chain)
        return value, *(x for x in pullback(value) if x is not None)

    return run


_CHAIN = ((70, 12, 40), (11, 40, 40), (40,))
_LENGTHS = {"lengths": np.arange(70) % 12 + 1}
_CHAIN_OF_FEW_STATES = ((300, 12, 6), (11, 6, 6), (6,))
_CHAIN_WITH_FINAL = (*_CHAIN, (70, 40))
_CHAIN_OF_ONE_MATRIX = ((3, 30, 9, 150), (1, 150, 150), (150,))

CALLS = {
    "logmatmulexp": Call(_product(alc.logmatmulexp), ((150, 96), (96, 130))),
    "logmatmulexp, unproved": Call(_product(alc.logmatmulexp), ((150, 96), (96, 130)), sd=100),
    "logmatmulexp, thin": Call(_product(alc.logmatmulexp), ((2, 300), (300, 200))),
    "logmatmulexp, small": Call(_product(alc.logmatmulexp), ((900, 16, 16), (900, 16, 16))),
    "logmatmulexp, broadcast": Call(_product(alc.logmatmulexp), ((5, 1, 40, 50), (7, 50, 60))),
    "maxplus_matmul": Call(_product(alc.maxplus_matmul), ((150, 96), (96, 130))),
    "matmul": Call(_product(alc.matmul), ((5, 1, 40, 50), (7, 50, 60))),
    "logchainexp": Call(lambda stack: (alc.logchainexp(stack),), ((9, 30, 30),)),
    "gradients of logmatmulexp": Call(
        _product_gradients(alc.vjp.logmatmulexp), ((150, 96), (96, 130))
    ),
    "gradients of logmatmulexp, unproved": Call(
        _product_gradients(alc.vjp.logmatmulexp), ((150, 96), (96, 130)), sd=100
    ),
    "gradients of logmatmulexp, small": Call(
        _product_gradients(alc.vjp.logmatmulexp), ((900, 16, 16), (900, 16, 16)), sd=30
    ),
    "gradients of maxplus_matmul": Call(
        _product_gradients(alc.vjp.maxplus_matmul), ((150, 96), (96, 130))
    ),
    "log_partition": Call(_chain("log_partition"), _CHAIN, linear=(1, 2)),
    "log_partition, unproved": Call(_chain("log_partition"), _CHAIN, linear=(1, 2), sd=100),
    "log_partition, one matrix": Call(_chain("log_partition"), _CHAIN_OF_ONE_MATRIX, linear=(1, 2)),
    "log_partition, few states": Call(
        _chain("log_partition"), _CHAIN_OF_FEW_STATES, linear=(1, 2), sd=100
    ),
    "forward_messages": Call(_chain("forward_messages"), _CHAIN, linear=(1, 2)),
    "backward_messages": Call(_chain("backward_messages"), _CHAIN, linear=(1, 2)),
    "marginals": Call(_chain("marginals"), _CHAIN, linear=(1, 2)),
    "expected_transitions": Call(_chain("expected_transitions"), _CHAIN, linear=(1, 2)),
    "gradients of log_partition": Call(_chain_gradients(), _CHAIN, linear=(1, 2)),
    "log_partition, lengths": Call(_chain("log_partition", **_LENGTHS), _CHAIN, linear=(1, 2)),
    "marginals, lengths": Call(_chain("marginals", **_LENGTHS), _CHAIN, linear=(1, 2)),
    "gradients of log_partition, lengths": Call(
        _chain_gradients(**_LENGTHS), _CHAIN, linear=(1, 2)
    ),
    "gradients of log_partition, few states": Call(
        _chain_gradients(), _CHAIN_OF_FEW_STATES, linear=(1, 2)
    ),
    "gradients of log_partition, final": Call(
        _chain_gradients(**_LENGTHS), _CHAIN_WITH_FINAL, linear=(1, 2, 3)
    ),
    "viterbi": Call(_chain("viterbi"), _CHAIN, linear=(1, 2)),
    "viterbi, lengths": Call(_chain("viterbi", **_LENGTHS), _CHAIN_WITH_FINAL, linear=(1, 2, 3)),
    "entropy": Call(_chain("entropy"), _CHAIN, linear=(1, 2)),
    "entropy, few states": Call(_chain("entropy"), _CHAIN_OF_FEW_STATES, linear=(1, 2), sd=30),
    "filtered, lengths": Call(_chain("filtered", **_LENGTHS), _CHAIN, linear=(1, 2)),
    "sample": Call(_sample, _CHAIN_WITH_FINAL, linear=(1, 2, 3)),
}
# Those that kernels alone compute: they only queue work, and depend on no numbers of the device.
WITHOUT_WAITING = [
    name for name in CALLS if name.startswith(("logmatmulexp", "maxplus_matmul", "matmul"))
]
