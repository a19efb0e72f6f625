"""Chains of log weights: sums over all paths through a lattice of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain import _chains as chains
from arraylogchain import _select
from arraylogchain._core.context import Array, Context, library_name
from arraylogchain._inputs.arrays import are_numpy, dtype_name, namespace_of, promote
from arraylogchain._inputs.chain import ARGUMENTS, Chain, ChainArguments, check_states
from arraylogchain._inputs.options import at_least, check_workers, check_workspace
from arraylogchain._inputs.random import check_count, check_generator, fill, workspace_for_samples
from arraylogchain._inputs.tensors import dynamo_disabled, is_differentiated
from arraylogchain._results import ChainPath, ChainPosterior, FilteredChain, Plan
from arraylogchain._torch.compiling import as_operator

__all__ = ["ChainPath", "ChainPosterior", "FilteredChain", "LogChain"]

_NO_COUNTS = "transitions or log_transitions must be given for expected_transitions, got neither"


class LogChain:
    """Paths through T steps of K states, weighted by potentials and transitions.

    The weight of a path s is ``initial[s_0] * prod_i transitions[i, s_i, s_{i+1}] *
    prod_i exp(log_potentials[i, s_i]) * final[s_{T-1}]``. Hidden Markov models, linear-chain CRFs
    and products ``p0 · D_0 · P_1 · D_1 · ... · x`` of matrices and diagonals are chains.

    Parameters
    ----------
    log_potentials : array [..., T, K]
        Logarithms of weights of being in a state at a step. Weights need not be normalized. States
        that a step does not have get -inf.
    transitions : array [..., T - 1, K, K], [..., 1, K, K] or [K, K], optional
        Nonnegative weights of going [from, to]; one matrix stands for every step.
    log_transitions : array, optional
        Their logarithms instead, where -inf is an exact zero.
    initial : array [..., K], optional
        Nonnegative weights of the first state. Default: all one.
    log_initial : array [..., K], optional
        Their logarithms instead.
    final : array [..., K], optional
        Nonnegative weights of the state at the last step of each row. Default: all one.
    log_final : array [..., K], optional
        Their logarithms instead.
    lengths : array [...] of integers, optional
        Number of steps of each row, from 1 to T. Values past these steps are never read. Lengths
        broadcast to the batch axes of the arrays, and add none.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output, at least 1 MiB. Default: 64 MiB,
        on CUDA devices 256 MiB. Counts and gradients in half precision are accumulated in float32
        first, weights of paths in float64, and paths are copied if lengths differ; none of this is
        counted.
    workers : int, optional
        Largest number of threads, the calling thread included. Default: as many as the process may
        use. Results of compiled loops do not depend on it. BLAS has threads of its own; Dask tasks
        use one thread each.

    Raises
    ------
    TypeError
        If `log_potentials` is not an array of real floating-point numbers, or another argument is
        neither that nor lists, integers or booleans, which take its dtype; if lengths are not
        integers, or if libraries differ.
    ValueError
        If lengths are not between 1 and T, if shapes or devices do not fit, if transitions (or
        initial or final weights) are given both ways, if transitions are missing though T > 1, if
        linear weights are negative, or if the workspace or the number of workers is too small.

    Notes
    -----
    Batch axes broadcast and are never expanded: neither copies of shared transitions nor K x K
    arrays for each row are made. Arrays except `lengths` are read when a method is called. Linear
    weights are also read when the chain is made, to reject negative ones, except on a device and in
    transforms of torch: there negative weights give NaN. While torch compiles, all are read, and
    checked, when a method is called.

    Examples
    --------
    >>> import numpy as np
    >>> chain = LogChain(np.zeros((3, 2)), transitions=np.ones((1, 2, 2)))
    >>> round(float(np.exp(chain.log_partition())), 6)  # 2**3 paths of weight 1
    8.0
    """

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
        self._workspace = check_workspace(workspace, log_potentials)
        self._workers = check_workers(workers)
        # Gradients store all messages unless the caller limits the workspace.
        self._keeps_messages = workspace is None
        weights = transitions, log_transitions, initial, log_initial, final, log_final
        arrays = dict(zip(ARGUMENTS, (log_potentials, *weights), strict=True))
        self._arguments = ChainArguments.validated(arrays, lengths)
        if lazy := self._lazy():
            lazy.TimeChunks.of(self)  # validates the arrays

    def _lazy(self) -> ModuleType | None:
        """Return the module of methods for Dask arrays, or None."""
        if not self._arguments.is_lazy():
            return None
        from arraylogchain._dask import chain as lazy

        return lazy

    def _run(self, function: Callable[..., Any], variant: str = "", *arguments: Any) -> Any:
        """Return the result of a function of `_chains`, outside of autograd.

        Tensors in autograd, and Dask arrays, are passed to the variant in their module instead, if
        it has one of that name, with the arguments of the method. Without a variant they are not.
        """
        values = self._arguments.arrays.values()
        if variant and not are_numpy(*values, self._arguments.lengths):
            module = self._lazy()
            if is_differentiated(*values):
                from arraylogchain._torch import chain as module
            if specialized := getattr(module, variant, None):
                return specialized(self, *arguments)
        ctx, chain = self._arguments.prepare()
        with ctx.computing(self._workers):
            return ctx.to_caller(function(ctx, chain, self._workspace))

    @as_operator
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
        return self._run(chains.messages.log_partition, "log_partition")

    @as_operator
    def forward_messages(self) -> Array:
        """Return the logs of the sums over all paths up to each state.

        Returns
        -------
        array [..., T, K]
            ``alpha[..., i, k]`` sums the weights of all paths of the first i + 1 steps that end
            in state k, the potential of step i included; -inf exactly where there is none, and past
            a row's length. Every entry is accurate to rounding, however much smaller than others.

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
        return self._run(chains.messages.forward_messages, "forward_messages")

    @as_operator
    def backward_messages(self) -> Array:
        """Return the logs of the sums over all paths from each state on.

        Returns
        -------
        array [..., T, K]
            ``beta[..., i, k]`` sums the weights of all continuations of paths from state k of step
            i: transitions, later potentials and the final weight, without the potential of step i.
            At a row's last step it is the log of the final weight, 0 by default; past it, and
            exactly where no path continues, it is -inf. Every entry is accurate to rounding.

        Examples
        --------
        >>> import numpy as np
        >>> left_to_right = np.array([[[0.5, 0.5], [0.0, 1.0]]])
        >>> chain = LogChain(np.log([[1.0, 1.0], [1.0, 3.0]]), transitions=left_to_right)
        >>> np.exp(chain.backward_messages()).round(6).tolist()
        [[2.0, 3.0], [1.0, 1.0]]
        """
        return self._run(chains.messages.backward_messages, "backward_messages")

    @as_operator
    def marginals(self) -> Array:
        """Return the posterior probability of each state at each step.

        Returns
        -------
        array [..., T, K]
            The posterior probability of state k at step i: also the derivative of `log_partition`
            with respect to the log potentials. Its error is a few eps of 1 for each step, and
            grows as that of `log_partition` does. Zeros past a row's length, where no path has a
            positive weight, and where weights are infinite.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.log([[0.5, 0.5], [0.9, 0.3]])
        >>> LogChain(x, transitions=np.ones((1, 2, 2))).marginals().round(6).tolist()
        [[0.5, 0.5], [0.75, 0.25]]
        """
        return self._run(chains.marginals.marginals, "marginals")

    @as_operator
    def entropy(self) -> Array:
        """Return the entropy of the posterior distribution over paths, in nats.

        Returns
        -------
        array [...]
            ``-sum(p * log(p))`` over all paths, where p is the weight of a path over the sum of
            weights. Its error is a few eps for each step, times the range of potentials and log
            transitions within a step.
            0 where no path has a positive weight, NaN where weights are infinite.

        Examples
        --------
        >>> import numpy as np
        >>> chain = LogChain(np.zeros((10, 2)), transitions=np.ones((1, 2, 2)))
        >>> round(float(chain.entropy() / np.log(2)), 6)  # 2**10 paths of the same weight
        10.0
        """
        return self._run(chains.entropy.entropy, "entropy")

    @as_operator
    def viterbi(self) -> ChainPath:
        """Return a path of largest weight.

        Returns
        -------
        states : array [..., T] of integers
            Of several such paths, the one with the smallest last state, of these the one with the
            smallest state before it, and so on. Past a row's length states are -1. All are 0
            where no path has a positive weight, and -1 where the log weight is NaN.
        log_weight : array [...]
            The log of that path's weight: -inf where no path has a positive weight, NaN where a
            weight of the row is NaN.

        Notes
        -----
        Paths whose weights differ by less than the rounding errors of T sums count as equal, and
        the log weight is as accurate; `log_weight` of this path is accurate to its last digits.
        Results are detached from autograd: the derivatives of the largest log weight are the
        derivatives of `log_weight` of this path.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[[0.9, 0.1], [0.1, 0.9]]])
        >>> x = np.log([[0.9, 0.1], [0.4, 0.6], [0.9, 0.1]])
        >>> path = LogChain(x, transitions=stay).viterbi()
        >>> path.states.tolist(), round(float(np.exp(path.log_weight)), 6)
        ([0, 0, 0], 0.26244)
        """
        return ChainPath(*self._run(chains.paths.viterbi, "viterbi"))

    @as_operator
    def best_paths(self, num_paths: int) -> ChainPath:
        """Return the paths of largest weight, in the order of their weights.

        Parameters
        ----------
        num_paths : int
            Number of paths, at least 1.

        Returns
        -------
        states : array [num_paths, ..., T] of integers
            The first path is that of `viterbi`. Of paths of equal weight, the one with the smallest
            last state comes first, of these the one with the smallest state before it, and so on.
            Past a row's length states are -1. They are 0 where a row has fewer paths of positive
            weight, and -1 where its log weight is NaN.
        log_weight : array [num_paths, ...]
            -inf where a row has fewer paths of positive weight, NaN where a weight of the row is
            NaN.

        Raises
        ------
        TypeError
            If `num_paths` is not an integer.
        ValueError
            If `num_paths` is less than 1, if paths would exceed addressable memory, or if Dask
            arrays have several chunks along time.

        Notes
        -----
        The backtrace of `viterbi` for several paths: at each step it keeps the states that the best
        paths end in, in time proportional to T, K and `num_paths`. Rounding is as for `viterbi`. In
        a row with weights of inf, only paths of weight inf are found, and not always all of them.
        Results are detached from autograd: ``log_weight(paths.states)`` of `LogChain` has
        gradients.

        Examples
        --------
        >>> import numpy as np
        >>> stay = np.array([[[0.9, 0.1], [0.1, 0.9]]])
        >>> x = np.log([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]])
        >>> paths = LogChain(x, transitions=stay).best_paths(2)
        >>> paths.states.tolist(), np.exp(paths.log_weight).round(6).tolist()
        ([[0, 0, 0], [1, 1, 1]], [0.18144, 0.02916])
        """
        num_paths = at_least(1, "num_paths", num_paths)

        def compute(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
            check_count("num_paths", (num_paths, *chain.batch, chain.num_steps))
            return chains.paths.best_paths(ctx, chain, workspace, num_paths)

        return ChainPath(*self._run(compute, "best_paths", num_paths))

    @as_operator
    def log_weight(self, states: Array) -> Array:
        """Return the log weights of paths.

        Subtracting `log_partition` gives the log of a path's posterior probability.

        Parameters
        ----------
        states : array [..., T] of integers
            Leading axes broadcast with the batch axes: [num_samples, ..., T], as `sample` returns,
            gives weights [num_samples, ...]. States past a row's length are ignored.

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
        return self._run_on_paths("log_weight", chains.log_weight.log_weight, states)

    @as_operator
    def log_probability(self, states: Array) -> Array:
        """Return the logs of the posterior probabilities of paths: minus the loss of a CRF.

        It is `log_weight` minus `log_partition`, without rounding errors of their size.

        Parameters
        ----------
        states : array [..., T] of integers
            As for `log_weight`; each path takes as long as a row.

        Returns
        -------
        array [...]
            Never positive. -inf where no path has a positive weight, and for paths of weight zero;
            NaN where a weight of the row is NaN or infinite. Its relative error is a few eps for
            each step, and grows as the error of `log_partition` does.

        Raises
        ------
        TypeError
            If the states are not integers.
        ValueError
            If shapes do not fit, or a state is not among 0 ... K - 1.

        Notes
        -----
        The product of the probabilities of each state given the state before it: a posterior over
        paths is a Markov chain itself [1]_. Gradients at the path's states are sums of the
        marginals of all other states: they are as accurate for probabilities near 1.

        .. [1] O. Cappé, E. Moulines and T. Rydén, "Inference in Hidden Markov Models", Springer
           (2005), section 3.3.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.array([[0.0, -800.0], [0.0, -800.0]])
        >>> chain = LogChain(x, transitions=np.ones((1, 2, 2)))
        >>> chain.log_probability(np.array([[0, 1], [1, 1]])).tolist()
        [-800.0, -1600.0]
        """
        return self._run_on_paths("log_probability", chains.log_probability.log_probability, states)

    def _run_on_paths(self, name: str, function: Callable[..., Any], states: Array) -> Any:
        """Return the result of a method on paths, which a function of `_chains` computes."""
        check_array(states)

        def compute(ctx: Context, chain: Chain, workspace: int) -> Array:
            return function(ctx, chain, workspace, check_states(ctx, states, chain, workspace))

        return self._run(compute, name, states)

    @dynamo_disabled
    def sample(self, num_samples: int = 1, *, rng: Any = None) -> Array:
        """Draw paths from their posterior distribution.

        Parameters
        ----------
        num_samples : int
        rng : None, int, numpy.random.Generator, cupy.random.Generator or torch.Generator
            Source of randomness: an integer seeds a NumPy generator, None makes one that
            differs from call to call. torch.Generator is for tensors only.

        Returns
        -------
        array [num_samples, ..., T] of integers
            Independent paths, drawn with probabilities proportional to their weights; paths of
            weight 0 are never drawn. A row without a path of positive weight has states 0; one
            whose weights sum to NaN has states -1. Past a row's length they are -1. The same state
            of the generator gives the same samples.

        Raises
        ------
        TypeError
            If `rng` is of another type.
        ValueError
            If `num_samples` is negative, or samples would exceed addressable memory.

        Notes
        -----
        Forward filtering, backward sampling [2]_. Samples are detached from autograd.

        .. [2] S. Frühwirth-Schnatter, "Data augmentation and dynamic linear models", Journal of
           Time Series Analysis 15 (1994).

        Examples
        --------
        >>> import numpy as np
        >>> left_to_right = np.array([[[0.5, 0.5], [0.0, 1.0]]])
        >>> x = np.log([[1.0, 1e-9], [1.0, 1.0], [1e-9, 1.0]])
        >>> chain = LogChain(x, transitions=left_to_right)
        >>> paths = chain.sample(100, rng=0)
        >>> sorted(set(map(tuple, paths.tolist())))  # all others have negligible weight
        [(0, 0, 1), (0, 1, 1)]
        """
        rng = check_generator(rng, self._arguments.arrays["log_potentials"])
        num_samples = at_least(0, "num_samples", num_samples)

        def draw(ctx: Context, chain: Chain, workspace: int) -> Array:
            shape = (num_samples, *chain.batch, chain.num_steps)
            out, uniforms = workspace_for_samples(ctx, shape)
            fill(ctx, rng, uniforms)
            chains.paths.sample(ctx, chain, workspace, out, uniforms)
            return out

        return self._run(draw, "sample", num_samples, rng)

    @as_operator
    def expected_transitions(self) -> Array:
        """Return the expected count of each transition.

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
        if self._transitions() is None:
            raise ValueError(_NO_COUNTS)
        return self._run(chains.marginals.expected_transitions, "expected_transitions")

    @as_operator
    def posterior(self) -> ChainPosterior:
        """Return `log_partition`, `marginals` and `expected_transitions` together.

        One forward and one backward pass compute all three: the E-step of expectation maximization.

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
        return ChainPosterior(*self._run(chains.marginals.posterior, "posterior"))

    @as_operator
    def filtered(self) -> FilteredChain:
        """Return the probabilities of states given the steps so far, for chains of any length.

        They are the forward messages, normalized at every step.

        Returns
        -------
        probabilities : array [..., T, K]
            ``p[..., i, k]`` is the weight of the paths of the first i + 1 steps that end in state
            k, divided by the weight of all paths of these steps. 0 from the first step on where
            the latter is 0, and past a row's length.
        log_normalizers : array [..., T]
            Log normalizer of each step, the increase of the log of the latter weight: in a hidden
            Markov model the log probability of an observation given the previous ones. Their sum is
            `log_partition` or, with final weights, lacks ``log(sum(p * final))`` of a row's last
            step. -inf from the first step on where that weight is 0; 0 past a row's length.

        Notes
        -----
        Neither result depends on later steps or on final weights. Errors are as large as in the
        forward messages of a few steps, and do not grow with log Z.

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
        return FilteredChain(*self._run(chains.messages.filtered, "filtered"))

    def _transitions(self) -> Array | None:
        """Return the caller's transitions or their logarithms, or None."""
        arrays = self._arguments.arrays
        return arrays.get("transitions", arrays.get("log_transitions"))

    @dynamo_disabled
    def plan(self, operation: str = "log_partition") -> Plan:
        """Return the route that a method takes and the bound on its memory, to be printed.

        The route depends on shapes, dtypes, the workspace, the device of the arrays, and whether
        Numba can be used; and, where one matrix in memory serves all rows and steps, on how many of
        its entries are zero. It does not depend on other values, nor on lengths.

        Parameters
        ----------
        operation : str
            The name of the method, such as ``"viterbi"``.

        Raises
        ------
        ValueError
            If there is no such method, a chain without transitions has none to count, or the
            arrays are Dask's.

        Examples
        --------
        >>> import numpy as np
        >>> chain = LogChain(np.zeros((100_000, 64)), transitions=np.ones((1, 64, 64)))
        >>> chain.plan().route
        'loops'
        """
        if operation not in PLANNED:
            names = ", ".join(PLANNED)
            raise ValueError(f"operation must be one of {names}, got {operation!r}")
        if operation == "expected_transitions" and self._transitions() is None:
            raise ValueError(_NO_COUNTS)
        if self._lazy():
            raise ValueError(
                "arrays must be in memory for plan, got a Dask array; one block of it would do"
            )
        ctx, chain = self._arguments.prepare()
        sizes = chain.batch, chain.num_steps, chain.num_states
        choice = _select.route(operation, ctx, chain, self._workspace)
        return Plan(operation, *sizes, ctx.result_name, *choice, self._workspace)

    @dynamo_disabled
    def __repr__(self) -> str:
        arrays, lengths = self._arguments.floating(), self._arguments.lengths
        parts = [f"{name}={list(np.shape(x))}" for name, x in arrays.items()]
        if lengths is not None:
            parts.append(f"lengths={list(np.shape(lengths)) or lengths}")
        library = library_name(namespace_of("log_potentials", arrays["log_potentials"]))
        device = array_api_compat.device(arrays["log_potentials"])
        parts.append(promote(dtype_name(x.dtype) for x in arrays.values()))
        parts.append(library if device in ("cpu", None) else f"{library} {device}")
        if any(getattr(x, "requires_grad", False) for x in arrays.values()):
            parts.append("requires_grad=True")
        return f"LogChain({', '.join(parts)})"


def check_array(states: Array) -> None:
    """Raise TypeError if states are a `ChainPath` instead of its field."""
    if isinstance(states, ChainPath):
        raise TypeError(
            "states must be an array of integers, got a ChainPath; pass its field, path.states"
        )


# Operations of `LogChain.plan`: the other methods.
PLANNED = sorted(name for name in vars(LogChain) if not name.startswith("_") and name != "plan")
