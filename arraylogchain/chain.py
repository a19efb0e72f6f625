"""Chains of log weights: sums over all paths through a lattice of states."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from arraylogchain import _chain_calls, _dispatch
from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._arrays import (
    dtype_name,
    is_differentiated,
    is_lazy,
    is_traced,
    on_host,
    promote,
)
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._inputs import arguments
from arraylogchain._inputs.chain import Chain, enter_chain, make_chain
from arraylogchain._inputs.summary import summary
from arraylogchain._inputs.weights import check_weights
from arraylogchain._random import check_generator
from arraylogchain._threads import check_workers, using
from arraylogchain.plan import Plan, choose, plan_chain, sizes_of

__all__ = ["ChainPath", "ChainPosterior", "FilteredChain", "LogChain"]


class ChainPosterior(NamedTuple):
    """What `LogChain.posterior` returns; the counts are None for a chain without transitions."""

    log_partition: Array
    marginals: Array
    expected_transitions: Array | None


class FilteredChain(NamedTuple):
    """State probabilities given the steps so far, and the logs of what normalises them."""

    probabilities: Array
    log_normalizers: Array


class ChainPath(NamedTuple):
    """Paths through the states of chains, and the logs of their weights."""

    states: Array
    log_weight: Array


class LogChain:
    """Paths through T steps of K states, weighted by potentials and transitions.

    The weight of a path s is ``initial[s_0] * prod_i transitions[i, s_i, s_{i+1}] *
    prod_i exp(log_potentials[i, s_i]) * final[s_{T-1}]``. Hidden Markov models, linear-chain CRFs
    and products ``p0 · D_0 · P_1 · D_1 · ... · x`` of matrices and diagonals are chains.

    Parameters
    ----------
    log_potentials : array [..., T, K]
        Logarithms of weights of being in a state at a step. Weights need not be normalised. For
        steps of different numbers of states, see `pad_states`.
    transitions : array [..., T - 1, K, K], [..., 1, K, K] or [K, K], optional
        Nonnegative weights of going [from, to]; one matrix stands for every step.
    log_transitions : array, optional
        Their logarithms instead, where -inf is an exact zero.
    initial : array [..., K], optional
        Nonnegative weights of the first state. Default: all one.
    log_initial : array [..., K], optional
        Their logarithms instead.
    final : array [..., K], optional
        Nonnegative weights of the last state, the last real one of each row. Default: all one.
    log_final : array [..., K], optional
        Their logarithms instead.
    lengths : array [...] of integers, optional
        How many steps of each row are real, between 1 and T. What lies past them is never read.
        They broadcast with the batch axes.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB.
    workers : int, optional
        How many threads may work at a time, the caller's included. Default: as many as the process
        may use. Results of compiled loops do not depend on it. BLAS has threads of its own; tasks
        of Dask take one each, and what `torch.compile` compiles the default.

    Raises
    ------
    TypeError
        If an argument is not an array of real floating-point numbers, if lengths are not
        integers, or if libraries differ.
    ValueError
        If lengths are not between 1 and T, if shapes or devices do not fit, if transitions (or
        initial or final weights) are given both ways, if transitions are missing though T > 1, if
        linear weights are negative, or if the workspace or the number of workers is too small.

    Notes
    -----
    Batch axes broadcast and are never expanded: neither the transitions that rows share, nor
    anything of size K * K for each row, is ever made. Arrays are read when a method is called;
    linear weights are also read when the chain is made, to find negative ones, except on a device
    and where torch traces the call: there they give NaN.

    Examples
    --------
    >>> import numpy as np
    >>> chain = LogChain(np.zeros((3, 2)), transitions=np.ones((1, 2, 2)))
    >>> round(float(np.exp(chain.log_partition())), 6)  # 2**3 paths of weight 1
    8.0
    """

    def __new__(cls, log_potentials: Array = None, *others: Any, **options: Any) -> LogChain:
        """Make a chain of Dask arrays where there is one."""
        arguments.check_call(others, options)
        if is_lazy(log_potentials, *options.values()):
            from arraylogchain._dask.chain import LazyChain

            cls = LazyChain
        return super().__new__(cls)

    def __init__(
        self,
        log_potentials: Array,
        *,
        transitions: Array | None = None,
        log_transitions: Array | None = None,
        initial: Array | None = None,
        log_initial: Array | None = None,
        final: Array | None = None,
        log_final: Array | None = None,
        lengths: Array | Sequence[int] | int | None = None,
        workspace: int | None = None,
        workers: int | None = None,
    ) -> None:
        self._workspace, self._workers = check_workspace(workspace), check_workers(workers)
        # Only a bound that was asked for makes gradients keep less than every state.
        self._keeps_states = workspace is None
        options = {
            "transitions": transitions,
            "log_transitions": log_transitions,
            "initial": initial,
            "log_initial": log_initial,
            "final": final,
            "log_final": log_final,
        }
        given = arguments.check_given(options)
        self.arrays: dict[str, Array] = {"log_potentials": log_potentials, **given}
        self.lengths = lengths
        arguments.refuse_lists(self.arrays)
        self._entered: tuple[Context, Chain] | None = None
        if is_traced() or is_lazy(*self.arrays.values(), lengths):
            # Values, those of lengths included, are not at hand.
            shapes = {name: shape_of(x) for name, x in self.arrays.items()}
            self._batch = arguments.check_shapes(shapes)
            return
        if lengths is not None:
            # Once: calls would wait for what is on a device.
            self.lengths = np.array(on_host("lengths", lengths))
        self._entered = enter_chain(self.arrays, self.lengths)
        check_weights(*self._entered)
        self._batch = self._entered[1].batch

    def _compute(self, operation: str) -> Any:
        """Return what an operation makes of the chain: an array, or several."""
        if is_differentiated(*self.arrays.values()):
            with using(self._workers):
                return getattr(_differentiable(), operation)(*self._asked())
        return self._run(partial(_chain_calls.compute, operation))

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of `_chain_calls` makes of the chain; not part of autograd."""
        ctx, chain = self._entered or enter_chain(self.arrays, self.lengths)
        with using(self._workers), ctx.computing():
            return ctx.handed_back(function(ctx, chain, self._workspace, *args))

    def log_partition(self) -> Array:
        """Return the log of the sum of the weights of all paths.

        Returns
        -------
        array [...]
            -inf where no path has a positive weight. Its error is a few eps for each step, and
            grows with how far potentials on the deciding path lie below the largest of their
            step; it does not grow with the size of the result.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.log([[0.5, 0.5], [0.9, 0.2]])
        >>> stay = np.array([[[0.8, 0.2], [0.2, 0.8]]])
        >>> round(float(np.exp(LogChain(x, transitions=stay).log_partition())), 6)
        0.55
        """
        return self._compute("log_partition")

    def forward_messages(self) -> Array:
        """Return the logs of the sums over all paths up to each state.

        Returns
        -------
        array [..., T, K]
            ``alpha[..., i, k]`` sums the weights of all paths of the first i + 1 steps that end
            in state k, the potential of step i included; -inf exactly where there is none. Every
            entry is right to rounding, however small it is beside the others.

        Examples
        --------
        >>> import numpy as np
        >>> left_to_right = np.array([[[0.5, 0.5], [0.0, 1.0]]])
        >>> chain = LogChain(
        ...     np.zeros((3, 2)), transitions=left_to_right, initial=np.array([1.0, 0.0])
        ... )
        >>> np.exp(chain.forward_messages()).round(6).tolist()
        [[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]]
        """
        return self._compute("forward_messages")

    def backward_messages(self) -> Array:
        """Return the logs of the sums over all paths from each state on.

        Returns
        -------
        array [..., T, K]
            ``beta[..., i, k]`` sums the weights of what follows state k of step i, on all paths:
            transitions and later potentials, but not the potential of step i. It is 0 at the last
            step, and -inf exactly where no path leads on. Every entry is right to rounding.

        Examples
        --------
        >>> import numpy as np
        >>> left_to_right = np.array([[[0.5, 0.5], [0.0, 1.0]]])
        >>> chain = LogChain(np.log([[1.0, 1.0], [1.0, 3.0]]), transitions=left_to_right)
        >>> np.exp(chain.backward_messages()).round(6).tolist()
        [[2.0, 3.0], [1.0, 1.0]]
        """
        return self._compute("backward_messages")

    def marginals(self) -> Array:
        """Return the posterior probability of each state at each step.

        Returns
        -------
        array [..., T, K]
            The posterior probability of state k at step i: also the derivative of `log_partition`
            with respect to the log potentials. Its error is a few eps of 1 for each step. Zeros
            where no path has a positive weight, or where the sum over all paths is infinite.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.log([[0.5, 0.5], [0.9, 0.3]])
        >>> LogChain(x, transitions=np.ones((1, 2, 2))).marginals().round(6).tolist()
        [[0.5, 0.5], [0.75, 0.25]]
        """
        return self._compute("marginals")

    def entropy(self) -> Array:
        """Return the entropy of the posterior distribution over paths, in nats.

        Returns
        -------
        array [...]
            ``-sum(p * log(p))`` over all paths, p being the share of a path in the sum of all
            weights. It is computed in float64 where the device has it; its error is a few eps of
            that for each step, times how far potentials and log transitions differ within a step.
            0 where no path has a positive weight, NaN where weights are infinite.

        Examples
        --------
        >>> import numpy as np
        >>> chain = LogChain(np.zeros((10, 2)), transitions=np.ones((1, 2, 2)))
        >>> round(float(chain.entropy() / np.log(2)), 6)  # 2**10 paths of the same weight
        10.0
        """
        return self._compute("entropy")

    def viterbi(self) -> ChainPath:
        """Return a path of largest weight.

        Returns
        -------
        states : array [..., T] of integers
            Of several such paths the one with the smallest last state, and of these the one with
            the smallest state before it, and so on. Past a row's length states are -1. All are 0
            where no path has a positive weight.
        log_weight : array [...]
            The log of that path's weight: -inf where no path has a positive weight.

        Notes
        -----
        Weights that differ by less than the roundings of T sums are taken for the same; the log
        weight is that of the path returned, right to rounding. Nothing here has derivatives: those
        of the largest log weight are the derivatives of the log weight of this path.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[[0.9, 0.1], [0.1, 0.9]]])
        >>> x = np.log([[0.9, 0.1], [0.4, 0.6], [0.9, 0.1]])
        >>> path = LogChain(x, transitions=stay).viterbi()
        >>> path.states.tolist(), round(float(np.exp(path.log_weight)), 6)
        ([0, 0, 0], 0.26244)
        """
        return ChainPath(
            *self._undifferentiated("viterbi", partial(_chain_calls.compute, "viterbi"))
        )

    def log_weight(self, states: Array) -> Array:
        """Return the log weights of given paths.

        Less `log_partition`, it is the log of a path's posterior probability.

        Parameters
        ----------
        states : array [..., T] of integers
            Leading axes broadcast with the batch axes: [num_samples, ..., T], as `sample` returns,
            gives weights [num_samples, ...]. Past a row's length states may be anything.

        Returns
        -------
        array [...]
            -inf for paths of weight zero.

        Raises
        ------
        TypeError
            If the states are not integers.
        ValueError
            If shapes do not fit, or a state is not among 0 ... K - 1.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[[0.9, 0.1], [0.1, 0.9]]])
        >>> chain = LogChain(np.zeros((3, 2)), transitions=stay)
        >>> np.exp(chain.log_weight(np.array([[0, 0, 0], [0, 0, 1]]))).round(6).tolist()
        [0.81, 0.09]
        """
        if isinstance(states, ChainPath):
            raise TypeError("states is a ChainPath; pass its first field, path.states")
        if is_differentiated(*self.arrays.values()):
            return _differentiable().log_weight(*self._asked(), states, self._batch)
        return self._run(_chain_calls.log_weight, states)

    def sample(self, num_samples: int, rng: Any) -> Array:
        """Draw paths from their posterior distribution.

        Parameters
        ----------
        num_samples : int
        rng : numpy.random.Generator, cupy.random.Generator or torch.Generator
            Where the randomness comes from; torch.Generator for tensors only.

        Returns
        -------
        array [num_samples, ..., T] of integers
            Independent paths, each drawn with a probability in proportion to its weight: one of
            weight 0 never is. A row without a path of positive weight has states 0. Past a row's
            length they are -1. The same state of the generator gives the same samples.

        Raises
        ------
        TypeError
            If `rng` is not a generator.
        ValueError
            If `num_samples` is negative.

        Notes
        -----
        Forward filtering, backward sampling [1]_. Samples have no derivatives.

        .. [1] S. Frühwirth-Schnatter, "Data augmentation and dynamic linear models", Journal of
           Time Series Analysis 15 (1994).

        Examples
        --------
        >>> import numpy as np
        >>> left_to_right = np.array([[[0.5, 0.5], [0.0, 1.0]]])
        >>> x = np.log([[1.0, 1e-9], [1.0, 1.0], [1e-9, 1.0]])
        >>> chain = LogChain(x, transitions=left_to_right)
        >>> paths = chain.sample(100, np.random.default_rng(0))
        >>> sorted(set(map(tuple, paths.tolist())))  # the only two that weigh something
        [(0, 0, 1), (0, 1, 1)]
        """
        check_generator(rng, self.arrays["log_potentials"])
        try:
            num_samples = operator.index(num_samples)
        except (TypeError, ValueError):
            kind = f"{num_samples!r}, a {type(num_samples).__name__}"
            raise TypeError(f"num_samples is {kind}; it must be an integer") from None
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}; it must not be negative")
        return self._sample(num_samples, rng)

    def _sample(self, num_samples: int, rng: Any) -> Array:
        return self._undifferentiated("sample", _chain_calls.sample, num_samples, rng)

    def expected_transitions(self) -> Array:
        """Return how often each transition is expected to be taken.

        Returns
        -------
        array of the shape of transitions
            Posterior probabilities of going [from, to], summed over all rows that share a matrix,
            and over all steps if one matrix stands for all of them: also the derivatives of the sum
            of `log_partition` with respect to the logarithms of the transitions.

        Raises
        ------
        ValueError
            If the chain has no transitions.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[[0.9, 0.1], [0.1, 0.9]]])
        >>> chain = LogChain(np.zeros((11, 2)), transitions=stay)
        >>> chain.expected_transitions().round(6).tolist()
        [[[4.5, 0.5], [0.5, 4.5]]]
        """
        if arguments.one_of(self.arrays, arguments.TRANSITIONS) is None:
            raise ValueError("expected_transitions needs transitions or log_transitions")
        counts = self._compute("expected_transitions")
        return self._like_transitions(counts)

    def posterior(self) -> ChainPosterior:
        """Return `log_partition`, `marginals` and `expected_transitions` together.

        One pass forward and one back give all three: the E-step of expectation maximisation.

        Returns
        -------
        log_partition : array [...]
        marginals : array [..., T, K]
        expected_transitions : array of the shape of transitions, or None
            None if the chain has no transitions.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.log([[0.5, 0.5], [0.9, 0.3]])
        >>> posterior = LogChain(x, transitions=np.ones((2, 2))).posterior()
        >>> round(float(np.exp(posterior.log_partition)), 6)
        1.2
        >>> posterior.marginals.round(6).tolist()
        [[0.5, 0.5], [0.75, 0.25]]
        >>> posterior.expected_transitions.round(6).tolist()
        [[0.375, 0.125], [0.375, 0.125]]
        """
        log_z, marginals, counts = self._compute("posterior")
        return ChainPosterior(
            log_z, marginals, None if counts is None else self._like_transitions(counts)
        )

    def filtered(self) -> FilteredChain:
        """Return the probabilities of states given the steps so far, however long the chain.

        They are the forward messages, normalised at every step.

        Returns
        -------
        probabilities : array [..., T, K]
            ``p[..., i, k]`` is the share of paths that end in state k in the weight of all paths
            of the first i + 1 steps. From the first step on that no state can explain, and past a
            row's length, they are 0.
        log_normalizers : array [..., T]
            How much each step adds to the log of that weight: in a hidden Markov model the log
            probability of an observation given those before it. Their sum is `log_partition` or,
            with final weights, lacks ``log(sum(p[..., -1, :] * final))``. From the first step on
            that no state can explain they are -inf; past a row's length they are 0.

        Notes
        -----
        Neither depends on what follows a step, so that final weights have no part in them. Errors
        are those of the forward messages of a few steps, and do not grow with log Z.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[0.9, 0.1], [0.1, 0.9]])
        >>> x = np.log([[0.8, 0.2], [0.3, 0.6]])
        >>> filtered = LogChain(x, transitions=stay, initial=np.array([0.5, 0.5])).filtered()
        >>> filtered.probabilities.round(3).tolist()
        [[0.8, 0.2], [0.587, 0.413]]
        >>> np.exp(filtered.log_normalizers).round(3).tolist()
        [0.5, 0.378]
        """
        return FilteredChain(*self._compute("filtered"))

    def _like_transitions(self, x: Array) -> Array:
        """Return what belongs to the transitions in the shape that they were given in."""
        given = arguments.one_of(self.arrays, arguments.TRANSITIONS)
        return x[0, ...] if len(given.shape) < len(x.shape) else x

    def _value_and_pullback(self) -> tuple[Context, Array, _chain_calls.Pullback]:
        """Return what `vjp.log_partition` is made of."""
        ctx, chain = self._entered or enter_chain(self.arrays, self.lengths)
        with using(self._workers), ctx.computing():
            value, pullback = _chain_calls.value_and_pullback(
                ctx, chain, self._workspace, self._keeps_states
            )
            return ctx, ctx.hand_back(value), pullback

    def _undifferentiated(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `_run` does, of tensors that may take part in autograd as well."""
        run = partial(self._run, function, *args)
        if is_differentiated(*self.arrays.values()):
            return _differentiable().undifferentiated(name, run)
        return run()

    def _asked(self) -> tuple[dict[str, Array], int | None, Any]:
        """Return the arguments of the chain; the workspace only if one was asked for."""
        return self.arrays, None if self._keeps_states else self._workspace, self.lengths

    def plan(self, operation: str = "log_partition") -> Plan:
        """Return how a method will compute; print it.

        This depends on shapes, lengths, dtypes and on where the arrays are, not on their values.

        Parameters
        ----------
        operation : str
            The name of the method, such as ``"viterbi"``.

        Raises
        ------
        ValueError
            If there is no such method.

        Examples
        --------
        >>> import numpy as np
        >>> chain = LogChain(np.zeros((100_000, 64)), transitions=np.ones((1, 64, 64)))
        >>> chain.plan().route
        'segments'
        """
        if operation not in _dispatch.CHAINS:
            names = ", ".join(_dispatch.CHAINS)
            raise ValueError(f"operation is {operation!r}; it must be one of {names}")
        if self._entered is None:
            # Of arrays that are traced no more than shapes are read.
            chain = make_chain(self.arrays, None)
            choice = choose(operation, sizes_of(chain), ("array",), self._workspace)
        else:
            ctx, chain = self._entered
            choice = _dispatch.choice(operation, ctx, chain, self._workspace)
        dtype = promote(dtype_name(x.dtype) for x in self.arrays.values())
        return plan_chain(operation, chain, dtype, choice, self._workspace)

    def __repr__(self) -> str:
        shapes = {name: shape_of(x) for name, x in self.arrays.items()}
        return f"LogChain({summary(self.arrays, shapes, self.lengths, self.plan())})"


# What help and the reference show is what `__init__` takes, not what `__new__` does.
LogChain.__signature__ = inspect.signature(partial(LogChain.__init__, None))  # type: ignore


def _differentiable() -> ModuleType:
    """Return the functions for tensors that autograd follows; torch is loaded by then."""
    from arraylogchain._torch import chain

    return chain
