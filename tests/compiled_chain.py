"""Chains computed by compiled loops, in the place of `LogChain`: shared checks then check these."""

from functools import partial
from unittest.mock import patch

import numpy as np

import arraylogchain as alc
from arraylogchain import _chain_calls, _dispatch
from arraylogchain._context import quiet
from arraylogchain._inputs.chain import enter_chain

WORKSPACE = 64 << 20


def compiled(operation, ctx, chain, workspace):
    """Select the compiled implementation, in the place of `_dispatch.for_chain`."""
    return _dispatch.implementation(operation, "compiled")


class CompiledChain:
    """What tests use of `LogChain`, for NumPy arrays."""

    def __init__(self, log_potentials, *, lengths=None, workspace=None, final=None, **options):
        self.arrays = {"log_potentials": log_potentials, **options}
        self.workspace = WORKSPACE if workspace is None else workspace
        self.keep = workspace is None
        lengths = None if lengths is None else np.asarray(lengths)
        self.ctx, self.chain = enter_chain(
            {name: x for name, x in self.arrays.items() if x is not None}, lengths
        )
        if final is not None:
            object.__setattr__(self.chain, "final", final)

    def run(self, operation, *arguments):
        """Return what an operation gives, of the best paths the states alone."""
        found = self.call(operation, *arguments)
        return found[0] if operation == "viterbi" else found

    def call(self, operation, *arguments):
        call = getattr(_chain_calls, operation, partial(_chain_calls.compute, operation))
        with quiet(), patch.object(_dispatch, "for_chain", compiled):
            return call(self.ctx, self.chain, self.workspace, *arguments)

    def log_partition(self):
        return self.run("log_partition")

    def forward_messages(self):
        return self.run("forward_messages")

    def backward_messages(self):
        return self.run("backward_messages")

    def marginals(self):
        return self.run("marginals")

    def expected_transitions(self):
        return self.run("expected_transitions")

    def posterior(self):
        return self.run("posterior")

    def entropy(self):
        return self.run("entropy")

    def log_weight(self, states):
        return self.run("log_weight", states)

    def viterbi(self):
        return alc.ChainPath(*self.call("viterbi"))

    def sample(self, num_samples, rng):
        return self.run("sample", num_samples, rng)


def value_and_gradients(chain):
    """Return what `vjp.log_partition` does."""
    value, pullback = chain.run("value_and_pullback", chain.keep)
    names = ("transitions", "initial")
    has = {name for name in names if not {name, f"log_{name}"}.isdisjoint(chain.arrays)} | {
        "potentials"
    }
    wanted = frozenset(name for name in has if getattr(chain.chain, name) is not None)

    def gradients(cotangent):
        with quiet():
            found = pullback(cotangent, wanted)
        return alc.vjp.ChainGradients(
            *(found.get(name) for name in ("potentials", "transitions", "initial"))
        )

    return value, gradients
