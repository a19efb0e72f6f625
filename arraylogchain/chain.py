"""Chains of log weights: sums over all paths through a lattice of states."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._arrays import (
    detached,
    dtype_name,
    enter,
    is_differentiated,
    is_traced,
    on_host,
    promote,
)
from arraylogchain._chain import evaluate, on_device, sampling, solve
from arraylogchain._chain_calls import Pullback, value_and_pullback
from arraylogchain._inputs import arguments, sequences
from arraylogchain._inputs.chain import enter_chain
from arraylogchain._inputs.lengths import check_lengths, check_states
from arraylogchain._inputs.summary import summary
from arraylogchain._chain.path_weight import path_log_weight
from arraylogchain._chain.posterior import entropy, results
from arraylogchain._chain.steps import Chain
from arraylogchain._chain.viterbi.path import best_path
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._random import check_generator, uniforms
from arraylogchain.plan import Plan, Segments, plan_chain

__all__ = ["ChainPath", "LogChain"]


class ChainPath(NamedTuple):
    """Paths through the states of chains, and the logs of their weights."""

    states: Array
    log_weight: Array


class LogChain:
    """Paths through T steps of K states, weighted by potentials and transitions.

    The weight of a path s is ``initial[s_0] * prod_i transitions[i, s_i, s_{i+1}] *
    prod_i exp(log_potentials[i, s_i])``. Hidden Markov models, linear-chain CRFs and products
    ``p0 · D_0 · P_1 · D_1 · ... · x`` of matrices and diagonals are chains.

    Parameters
    ----------
    log_potentials : array [..., T, K], or sequence of T arrays [..., K_i]
        Logarithms of weights of being in a state at a step. Weights need not be normalised. Steps
        may have different numbers of states if these and the transitions are lists or tuples.
    transitions : array [..., T - 1, K, K] or [..., 1, K, K], or sequence, optional
        Nonnegative weights of going [from, to]; one matrix stands for every step. A sequence has
        T - 1 arrays [..., K_i, K_{i+1}].
    log_transitions : array or sequence, optional
        Their logarithms instead, where -inf is an exact zero.
    initial : array [..., K] or [..., K_0], optional
        Nonnegative weights of the first state. Default: all one.
    log_initial : array [..., K], optional
        Their logarithms instead.
    lengths : array [...] of integers, optional
        How many steps of each row are real, between 1 and T. What lies past them is never read.
        They broadcast with the batch axes.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB.

    Raises
    ------
    TypeError
        If an argument is no array of real floating-point numbers, if lengths are no integers, or
        if libraries differ.
    ValueError
        If lengths are not between 1 and T, if shapes or devices do not fit, if transitions (or the
        initial weights) are given both ways, if transitions are missing though T > 1, or if the
        workspace is too small.

    Notes
    -----
    Batch axes broadcast and are never expanded: neither the transitions that rows share, nor
    anything of size K * K for each row, is ever made. Arrays are read when a method is called.
    A negative weight has no logarithm and gives NaN.

    Arrays of sequences are read and copied when the chain is made: padded to the largest K_i with
    states of weight zero, and to the batch axes that any of the sequence's arrays has. This is
    memory besides `workspace`, and whether autograd follows is decided then, too. Such a chain
    costs up to some four times what one of max(K_i) states does. Messages, marginals and expected
    transitions are then lists of arrays of the given sizes. Infinite weights give NaN in more
    places than the given arrays alone would: wherever a state that was added meets them.

    Examples
    --------
    >>> import numpy as np
    >>> chain = LogChain(np.zeros((3, 2)), transitions=np.ones((1, 2, 2)))
    >>> round(float(np.exp(chain.log_partition())), 6)  # 2**3 paths of weight 1
    8.0

    Two states, then three:

    >>> chain = LogChain([np.zeros(2), np.zeros(3)], transitions=[np.ones((2, 3))])
    >>> chain
    LogChain(log_potentials=([2], [3]), transitions=([2, 3]), float64, numpy, route=vector)
    >>> round(float(np.exp(chain.log_partition())), 6)
    6.0
    """

    def __init__(
        self,
        log_potentials: Array | Sequence[Array],
        *,
        transitions: Array | Sequence[Array] | None = None,
        log_transitions: Array | Sequence[Array] | None = None,
        initial: Array | None = None,
        log_initial: Array | None = None,
        lengths: Array | Sequence[int] | int | None = None,
        workspace: int | None = None,
    ) -> None:
        self._workspace = check_workspace(workspace)
        # Only a bound that was asked for makes gradients keep less than every state.
        self._keeps_states = workspace is None
        options = {
            "transitions": transitions,
            "log_transitions": log_transitions,
            "initial": initial,
            "log_initial": log_initial,
        }
        given = {name: x for name, x in options.items() if x is not None}
        arguments.check_only_one(given, arguments.TRANSITIONS)
        arguments.check_only_one(given, arguments.INITIAL)
        self.arrays: dict[str, Array] = {"log_potentials": log_potentials, **given}
        self.lengths = lengths
        # How to cut results back, where steps have different numbers of states.
        self.sequences: sequences.Sequences | None = None
        if arguments.are_sequences(self.arrays):
            self.arrays, self.sequences = sequences.pad(self.arrays)
        if is_traced():
            shapes = {name: shape_of(x) for name, x in self.arrays.items()}
            self._batch = arguments.check_shapes(shapes)
            self._has_kernel = False
        else:
            if lengths is not None:
                # Once: calls would wait for what is on a device.
                self.lengths = np.array(on_host("lengths", lengths))
            ctx, chain = self._enter()
            self._batch = chain.batch
            self._has_kernel = on_device.has_kernel(ctx, chain)

    def _enter(self) -> tuple[Context, Chain]:
        """Return the context and the arrays to compute with; no part of autograd."""
        ctx, given = enter({name: detached(x) for name, x in self.arrays.items()})
        return ctx, self._chain(given)

    def _chain(self, given: Mapping[str, Array]) -> Chain:
        shapes = {name: shape_of(x) for name, x in given.items()}
        batch = arguments.check_shapes(shapes)
        return Chain(
            batch=batch,
            count=shapes["log_potentials"][-2],
            size=shapes["log_potentials"][-1],
            transitions=given.get("transitions", given.get("log_transitions")),
            potentials=given["log_potentials"],
            start=given.get("initial", given.get("log_initial")),
            transitions_in_logs="log_transitions" in given,
            start_in_logs="log_initial" in given,
            lengths=check_lengths(self.lengths, batch, shapes["log_potentials"][-2]),
        )

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
        if is_differentiated(*self.arrays.values()):
            return _differentiable().log_partition(*self._asked())
        ctx, chain = self._enter()
        by_kernel = on_device.log_partition
        with ctx.computing():
            out = self._solved(ctx, chain, evaluate.log_partition, -math.inf, by_kernel=by_kernel)
            return ctx.hand_back(out)

    def kept_log_partition(self) -> tuple[Context, Array, Pullback]:
        """Return what `vjp.log_partition` is made of; see `_chain_calls.value_and_pullback`."""
        num_steps = self.arrays["log_potentials"].shape[-2]
        lengths = check_lengths(self.lengths, self._batch, num_steps)
        ctx, chain = enter_chain(self.arrays, lengths)
        with ctx.computing():
            out, pullback = value_and_pullback(ctx, chain, self._workspace, self._keeps_states)
            return ctx, ctx.hand_back(out), pullback

    def kept_gradient(self, ctx: Context, name: str, x: Array) -> Any:
        """Return the gradient of an argument as `vjp.log_partition` hands it back."""
        if self.sequences is None:
            return ctx.hand_back(x)
        return self.sequences.hand_back_gradient(ctx, name, x)

    def forward_messages(self) -> Array | list[Array]:
        """Return the logs of the sums over all paths up to each state.

        Returns
        -------
        array [..., T, K], or list of arrays [..., K_i]
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
        return self._states(
            "forward_messages", evaluate.forward_messages, on_device.forward_messages, -math.inf
        )

    def backward_messages(self) -> Array | list[Array]:
        """Return the logs of the sums over all paths from each state on.

        Returns
        -------
        array [..., T, K], or list of arrays [..., K_i]
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
        return self._states(
            "backward_messages", evaluate.backward_messages, on_device.backward_messages, -math.inf
        )

    def marginals(self) -> Array | list[Array]:
        """Return the posterior probability of each state at each step.

        Returns
        -------
        array [..., T, K], or list of arrays [..., K_i]
            The share that paths through state k at step i have in the sum over all paths: also the
            derivative of `log_partition` by the log potentials. Its error is a few eps of 1 for
            each step. Zeros where no path has a positive weight, or where weights are infinite.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.log([[0.5, 0.5], [0.9, 0.3]])
        >>> LogChain(x, transitions=np.ones((1, 2, 2))).marginals().round(6).tolist()
        [[0.5, 0.5], [0.75, 0.25]]
        """
        return self._states("marginals", results.marginals, on_device.marginals, 0.0)

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
        if is_differentiated(*self.arrays.values()):
            return _differentiable().entropy(*self._asked())
        ctx, chain = self._enter()
        with ctx.computing():
            return ctx.hand_back(self._solved(ctx, chain, entropy.entropy, 0.0))

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
        path: ChainPath = self._undifferentiated("viterbi", self._viterbi)
        return path

    def _viterbi(self) -> ChainPath:
        ctx, chain = self._enter()
        trailing, dtype = (chain.count,), ctx.index_dtype
        layout = {"trailing": trailing, "dtype": dtype, "past_end": -1}
        with ctx.computing():
            found = self._solved(ctx, chain, best_path, 0, **layout)
            weight = path_log_weight(ctx, chain, found, self._workspace)
            return ChainPath(ctx.hand_back(self._within(found)), ctx.hand_back(weight))

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
            If the states are no integers.
        ValueError
            If shapes do not fit, or a state is not among 0 ... K - 1 (K_i - 1 at step i).

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
        ctx, chain = self._enter()
        with ctx.computing():
            path = check_states(ctx, states, chain)
            if self.sequences is not None:
                sequences.check_own(path, self.sequences.sizes)
            return ctx.hand_back(path_log_weight(ctx, chain, path, self._workspace))

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
            length they are -1. The same state of the generator gives the same samples, if the
            arguments of the chain are the same, `workspace` included.

        Raises
        ------
        TypeError
            If `rng` is no generator.
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
            raise TypeError(f"num_samples is {kind}; it must be a whole number") from None
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}; it must not be negative")
        return self._undifferentiated("sample", lambda: self._sample(num_samples, rng))

    def _sample(self, num_samples: int, rng: Any) -> Array:
        ctx, chain = self._enter()
        draw = uniforms(rng, ctx)

        def compute(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
            return sampling.sample(ctx, chain, draw, num_samples, segments, workspace)

        lead, trailing, dtype = (num_samples,), (chain.count,), ctx.index_dtype
        layout = {"lead": lead, "trailing": trailing, "dtype": dtype, "past_end": -1}
        with ctx.computing():
            out = self._solved(ctx, chain, compute, 0, **layout)
            return ctx.hand_back(self._within(out))

    def expected_transitions(self) -> Array | list[Array]:
        """Return how often each transition is expected to be taken.

        Returns
        -------
        array of the shape of transitions, or list of such arrays
            Posterior probabilities of going [from, to], summed over all rows that share a matrix,
            and over all steps if one matrix stands for all of them: also the derivatives of the sum
            of `log_partition` by the logarithms of the transitions.

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
        if "transitions" not in self.arrays and "log_transitions" not in self.arrays:
            raise ValueError("expected_transitions needs transitions or log_transitions")
        if is_differentiated(*self.arrays.values()):
            out = _differentiable().expected_transitions(*self._asked())
            return out if self.sequences is None else self.sequences.cut_transitions(out)
        ctx, chain = self._enter()
        with ctx.computing():
            if chain.size == 0 or 0 in chain.batch or chain.count == 1:
                shape = shape_of(chain.transitions)
                out = ctx.xp.zeros(shape, dtype=ctx.result_dtype, device=ctx.device)
            else:
                out = solve.expected_transitions(ctx, chain, self._planned(chain))
            if self.sequences is None:
                return ctx.hand_back(out)
            return sequences.hand_back(ctx, self.sequences.cut_transitions(out))

    def _states(
        self,
        name: str,
        compute: solve.Compute,
        by_kernel: solve.ByKernel,
        past_end: float,
    ) -> Any:
        """Return what `compute` makes of the chain for all states, [..., T, K]."""
        if is_differentiated(*self.arrays.values()):
            out = getattr(_differentiable(), name)(*self._asked())
            return out if self.sequences is None else self.sequences.cut_states(out)
        ctx, chain = self._enter()
        layout = {"trailing": (chain.count, chain.size), "past_end": past_end}
        with ctx.computing():
            out = self._solved(ctx, chain, compute, past_end, by_kernel, **layout)
            if self.sequences is None:
                return ctx.hand_back(out)
            return sequences.hand_back(ctx, self.sequences.cut_states(out))

    def _solved(
        self,
        ctx: Context,
        chain: Chain,
        compute: solve.Compute,
        nothing: float,
        by_kernel: solve.ByKernel | None = None,
        **layout: Any,
    ) -> Array:
        """Return what `compute` makes of the chain, and `nothing` where there are no paths at all.

        See `solve.solve` for the layout of the result. Callers are within `Context.computing`.
        """
        if chain.size == 0 or 0 in chain.batch or 0 in layout.get("lead", ()):
            return solve.without_states(ctx, chain, nothing, **layout)
        plan = self._planned(chain)
        return solve.solve(ctx, chain, plan, compute, by_kernel=by_kernel, **layout)

    def _within(self, states: Array) -> Array:
        return states if self.sequences is None else self.sequences.within(states)

    def _undifferentiated(self, name: str, compute: Callable[[], Any]) -> Any:
        if is_differentiated(*self.arrays.values()):
            return _differentiable().undifferentiated(name, compute)
        return compute()

    def _asked(self) -> tuple[dict[str, Array], int | None, Any]:
        """Return the arguments of the chain; the workspace only if one was asked for."""
        return self.arrays, None if self._keeps_states else self._workspace, self.lengths

    def plan(self) -> Plan:
        """Return how the chain will be computed; print it.

        This depends on shapes, lengths, dtypes and on where the arrays are, not on their values.

        Examples
        --------
        >>> import numpy as np
        >>> chain = LogChain(np.zeros((100_000, 8)), transitions=np.ones((1, 8, 8)))
        >>> chain.plan().route
        'segments'
        """
        # Of these arrays no more than shapes are read.
        return self._planned(self._chain(self.arrays))

    def _planned(self, chain: Chain) -> Plan:
        matrices = chain.transitions
        return plan_chain(
            batch=chain.batch,
            count=chain.count,
            size=chain.size,
            sizes=chain.sizes,
            one_matrix=matrices is not None and int(matrices.shape[-3]) == 1,
            lengths=chain.lengths,
            read=sum(
                math.prod(x.shape)
                for x in (matrices, chain.potentials, chain.start)
                if x is not None
            ),
            dtype=promote(dtype_name(x.dtype) for x in self.arrays.values()),
            workspace=self._workspace,
            has_kernel=self._has_kernel,
        )

    def __repr__(self) -> str:
        shapes = {name: shape_of(x) for name, x in self.arrays.items()}
        given = shapes if self.sequences is None else self.sequences.shapes
        return f"LogChain({summary(self.arrays, given, self.lengths, self.plan())})"


def _differentiable() -> ModuleType:
    """Return the functions for tensors that autograd follows; torch is loaded by then."""
    from arraylogchain._torch import chain

    return chain
