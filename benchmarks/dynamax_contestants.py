"""The formulations of dynamax, compiled by jax: for one row, or vectorised for many."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory import temporaries_of_jax


def to_jax(x: NDArray[Any]) -> Any:
    """Return an array of jax, which has float64 only where it is told to."""
    import jax

    if x.dtype.kind == "f":
        jax.config.update("jax_enable_x64", x.dtype == np.float64)
    return jax.numpy.asarray(x)


class Dynamax:
    """A function of dynamax for one row, compiled for one or many.

    It takes x, transitions, initial, and a seed where it draws. With gradients, that is a cotangent
    instead, and the value comes with the gradients of the other three.
    """

    def __init__(self, infer: Callable[..., Any], *, has_gradients: bool = False) -> None:
        self._infer = infer
        self._has_gradients = has_gradients

    def __call__(self, x: Any, *others: Any) -> Any:
        import jax

        self._set_precision(x)
        return jax.block_until_ready(self._compiled(x, *others))

    def temporaries(self, x: Any, *others: Any) -> int:
        self._set_precision(x)
        return temporaries_of_jax(self._compiled.lower(x, *others).compile())

    def _set_precision(self, x: Any) -> None:
        import jax

        # Else its own constants would make float64 of a case in float32.
        jax.config.update("jax_enable_x64", x.dtype == np.float64)

    @cached_property
    def _compiled(self) -> Any:
        import jax

        def call(x: Any, transitions: Any, initial: Any, *seed: Any) -> Any:
            given = (initial, transitions[0] if len(transitions) == 1 else transitions)
            keys = [jax.random.key(s) for s in seed]
            if x.ndim == 2:
                return self._infer(*given, x, *keys)
            keys = [jax.random.split(key, len(x)) for key in keys]
            return jax.vmap(lambda *row: self._infer(*given, *row))(x, *keys)

        def value_and_gradients(*given: Any) -> tuple[Any, ...]:
            *inputs, cotangent = given
            value, pullback = jax.vjp(call, *inputs)
            return (value, *pullback(cotangent))

        return jax.jit(value_and_gradients if self._has_gradients else call)


def _log_partition(initial: Any, transitions: Any, x: Any) -> Any:
    from dynamax.hidden_markov_model import hmm_filter

    # What else it returns is not computed, here and below: the compiler leaves it out.
    return hmm_filter(initial, transitions, x).marginal_loglik


def _viterbi(initial: Any, transitions: Any, x: Any) -> Any:
    from dynamax.hidden_markov_model import hmm_posterior_mode

    return hmm_posterior_mode(initial, transitions, x)


def _marginals(initial: Any, transitions: Any, x: Any) -> Any:
    from dynamax.hidden_markov_model import hmm_smoother

    return hmm_smoother(initial, transitions, x).smoothed_probs


def _sample(initial: Any, transitions: Any, x: Any, key: Any) -> Any:
    from dynamax.hidden_markov_model import hmm_posterior_sample

    return hmm_posterior_sample(key, initial, transitions, x)[1]


log_partition = Dynamax(_log_partition)
value_and_gradients = Dynamax(_log_partition, has_gradients=True)
viterbi = Dynamax(_viterbi)
marginals = Dynamax(_marginals)
sample = Dynamax(_sample)
