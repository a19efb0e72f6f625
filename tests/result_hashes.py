"""Hash results and gradients of all scenarios, to compare two commits bit for bit.

    python -m tests.result_hashes > hashes.txt

prints a line for each run: its hash, operation, backend, dtype and scenario. The last line hashes
the hashes of all runs, so that it does not depend on names. Two commits with the same last line
compute the same bits on this machine. Chains come from tests/chain_scenarios.py, products
from tests/test_product_table.py, each by array operations and by compiled loops.
"""

import hashlib
import warnings

import numpy as np

import arraylogchain as alc
from arraylogchain import _select
from tests import chain_checks, test_product_table
from tests.chain_scenarios import SCENARIOS, make

METHODS = (
    "log_partition",
    "forward_messages",
    "backward_messages",
    "marginals",
    "entropy",
    "expected_transitions",
    "posterior",
    "filtered",
    "viterbi",
)
PRODUCTS = ("matmul", "logmatmulexp", "maxplus_matmul")
SMALL_WORKSPACE = 1 << 20


class ResultHash:
    """Hash of a sequence of results; of a call that raises, the name of its exception."""

    def __init__(self):
        self._digest = hashlib.sha256()

    def add(self, call, *args, **options):
        try:
            self._add(call(*args, **options))
        except Exception as error:
            self._digest.update(type(error).__name__.encode())

    def _add(self, x):
        if x is None:
            self._digest.update(b"None")
        elif isinstance(x, tuple | list):
            for item in x:
                self._add(item)
        else:
            x = np.asarray(x)
            if x.dtype.kind == "f":
                x = np.where(np.isnan(x), np.nan, x).astype(x.dtype)  # NaN may differ in payload
            self._digest.update(repr((x.shape, x.dtype.str)).encode())
            self._digest.update(np.ascontiguousarray(x).tobytes())

    def __str__(self):
        return self._digest.hexdigest()[:16]


def value_and_gradients(vjp, *args, **options):
    """Return the value of a function of `arraylogchain.vjp` and its gradients for noise."""
    value, pullback = vjp(*args, **options)
    like = value[0] if isinstance(value, tuple) else value
    cotangent = np.random.default_rng(0).normal(size=like.shape).astype(like.dtype)
    gradients = pullback(cotangent)
    return value, gradients if isinstance(gradients, np.ndarray) else tuple(gradients)


def chain_hash(name, dtype):
    result, options = ResultHash(), make(name)
    for key in ("only", "garbage"):
        options.pop(key, None)
    lengths, workspace = options.pop("lengths", None), options.pop("workspace", None)
    arrays = {"log_potentials": options.pop("x"), **options}
    arrays = {key: np.array(x, float) for key, x in arrays.items() if x is not None}
    if lengths is not None:
        chain_checks.fill_in_garbage(arrays, lengths, np.nan)
    arrays = {key: x.astype(dtype) for key, x in arrays.items()}
    x = arrays.pop("log_potentials")
    chain = alc.LogChain(x, **arrays, lengths=lengths, workspace=workspace)
    for method in METHODS:
        result.add(getattr(chain, method))
    result.add(chain.sample, 3, rng=0)
    result.add(lambda: chain.log_weight(np.asarray(chain.viterbi()[0])))
    result.add(value_and_gradients, alc.vjp.log_partition, chain)
    chain = alc.LogChain(x, **arrays, lengths=lengths, workspace=SMALL_WORKSPACE)
    result.add(chain.posterior)
    result.add(value_and_gradients, alc.vjp.log_partition, chain)
    return result


def product_hash(function, a, b, dtype):
    result = ResultHash()
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    result.add(getattr(alc, function), a, b)
    if hasattr(alc.vjp, function):
        for options in ({}, {"workspace": SMALL_WORKSPACE}):
            result.add(value_and_gradients, getattr(alc.vjp, function), a, b, **options)
    return result


def stack_hash(matrices, dtype):
    result, is_list = ResultHash(), isinstance(matrices, list)
    matrices = [x.astype(dtype) for x in matrices] if is_list else matrices.astype(dtype)
    result.add(alc.logchainexp, matrices)
    result.add(value_and_gradients, alc.vjp.logchainexp, matrices)
    return result


def hashes(dtype):
    """Yield (operation, scenario, hash) of all scenarios."""
    for name in SCENARIOS:
        yield "chain", name, chain_hash(name, dtype)
    for name, operands in (test_product_table.PAIRS | test_product_table.LARGE).items():
        for function in PRODUCTS:
            yield function, name, product_hash(function, *operands, dtype)
    for name, matrices in test_product_table.STACKS.items():
        yield "logchainexp", name, stack_hash(matrices, dtype)


def main():
    total = hashlib.sha256()
    backends = {"array": False, "compiled": True} if _select.COMPILED else {"array": False}
    for backend, compiled in backends.items():
        _select.COMPILED = compiled
        for dtype in ("float32", "float64"):
            for operation, name, result in hashes(dtype):
                print(f"{result}  {operation}, {backend}, {dtype}, {name}", flush=True)
                total.update(str(result).encode())
    print(f"{total.hexdigest()[:16]}  all")


if __name__ == "__main__":
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        main()
