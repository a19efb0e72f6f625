"""The cases of products."""

from __future__ import annotations

from typing import Any

from benchmarks import inputs as make
from benchmarks.registry import BOTH, Case

PRODUCTS, GRADIENTS = "Products", "Products with gradients"
RANGE = "Products of a wide range"
SPREADS = (1, 3, 10, 20, 30, 50, 100, 300, 1000)
# Terms that take minutes, or more memory than there is, by those who would meet them.
_MOST_TERMS = {
    "logsumexp in torch": 2e8,
    "logsumexp of SciPy in blocks": 5e8,
    "logsumexp in blocks": 2e10,
    "torch-semiring-einsum": 2e10,
}


def _product(
    name: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    operation: str = "log_product",
    dtype: str = "float32",
    sd: float = 1.0,
    group: str = PRODUCTS,
    devices: tuple[str, ...] = BOTH,
) -> Case:
    gradients = operation.endswith("_gradients")
    function = "maxplus_matmul" if operation == "maxplus" else "logmatmulexp"
    size = f"{a[0]}³" if a == b and len(a) == 2 else f"{list(a)} @ {list(b)}"
    spread = f", sd {sd:g}" if sd != 1 else ""
    terms = a[-2] * b[-1] * a[-1] * (a[0] if len(a) > 2 else 1)
    return Case(
        name=f"gradients-{name}" if gradients else name,
        title=f"{function} {size}, {dtype}{spread}{', with gradients' * gradients}",
        operation=operation,
        make=make.pair_and_cotangent if gradients else make.normal_pair,
        sizes={"a": a, "b": b, "dtype": dtype, "sd": sd},
        group=GRADIENTS if gradients else group,
        not_run={
            label: f"{terms:.1e} terms" for label, most in _MOST_TERMS.items() if terms > most
        },
        devices=devices,
    )


def _square(n: int, operation: str = "log_product", **options: Any) -> Case:
    spread = f"-sd{options['sd']:g}" if "sd" in options else ""
    name = f"logmatmulexp-{options.get('dtype', 'float32')}-{n}{spread}"
    return _product(name, (n, n), (n, n), operation, **options)


def _broadcast(
    name: str, subscripts: str, a: tuple[int, ...], b: tuple[int, ...], gradients: bool = False
) -> Case:
    """Return the case of a product with broadcast weights, with the given einsum equation."""
    return Case(
        name=f"{'gradients-' * gradients}matmul-{name}",
        title=f"matmul {list(a)} @ {list(b)}, float32{', with gradients' * gradients}",
        operation="product_gradients" if gradients else "product",
        make=make.with_subscripts_and_cotangent if gradients else make.with_subscripts,
        sizes={"a": a, "b": b, "subscripts": subscripts},
        group=GRADIENTS if gradients else PRODUCTS,
        devices=BOTH,
    )


def _einsum(name: str, equation: str, size: int, batch: tuple[int, ...] = ()) -> Case:
    return Case(
        name=f"einsum-{name}",
        title=f"logeinsumexp {equation}, matrices of {size}², float32",
        operation="einsum",
        make=make.normal_operands,
        sizes={"equation": equation, "size": size, "batch": batch},
        group=PRODUCTS,
    )


def _stack(d: int) -> Case:
    return Case(
        name=f"logchainexp-{d}",
        title=f"logchainexp of 1000 matrices {d} × {d}, float64",
        operation="matrix_chain",
        make=make.normal_stack,
        sizes={"count": 1000, "d": d},
        group=PRODUCTS,
        devices=BOTH,
    )


_BANDED = Case(
    name="logmatmulexp-banded-1024",
    title="logmatmulexp 1024³, float32, right operand 90 % -inf in a band",
    operation="log_product",
    make=make.banded_pair,
    sizes={"n": 1024, "zeros": 0.9},
    group=PRODUCTS,
    not_run={"logsumexp in torch": f"{1024**3:.1e} terms"},
)
_THIN, _FOUR = (262_144, 4), (4, 4)
_NUM_MATRICES = (100_000, 16, 16)
# Reports of pytorch by their numbers, reduced to one or two gigabytes.
_REPORTED = {
    "broadcast": ("abxi,bij->abxj", (8192, 8, 1, 64), (8, 64, 64)),
    "pytorch-154128": ("abxi,bij->abxj", (64, 256, 1, 100), (256, 100, 100)),
    "pytorch-149302": ("abxi,zbij->abxj", (128, 32, 1, 1024), (1, 32, 1024, 128)),
    "pytorch-18862": ("mk,akx->amx", (1024, 1024), (96, 1024, 1)),
}
PRODUCT_CASES = (
    *(_square(n, dtype=dtype) for dtype in ("float32", "float64") for n in (256, 1024, 2048)),
    *(_square(512, dtype=dtype, sd=sd) for dtype in ("float32", "float64") for sd in (20, 1000)),
    _square(4096, devices=("cuda",)),
    _square(2048, dtype="float16", devices=("cuda",)),
    _product("logmatmulexp-8", (8, 8), (8, 8)),
    _product("logmatmulexp-thin", _THIN, _FOUR),
    _product("logmatmulexp-thin-8", (1_000_000, 8), (8, 8)),
    _product("logmatmulexp-batch64-64", (64, 64, 64), (64, 64, 256)),
    _product("logmatmulexp-batch384-256", (384, 256, 256), (384, 256, 256)),
    _product("logmatmulexp-many-16", _NUM_MATRICES, _NUM_MATRICES, devices=("cuda",)),
    _BANDED,
    _product("maxplus-1024", (1024, 1024), (1024, 1024), "maxplus"),
    _product("maxplus-thin", _THIN, _FOUR, "maxplus"),
    _stack(8),
    _stack(64),
    _einsum("product-1024", "ik,kj->ij", 1024),
    _einsum("3-64", "bik,bkj,bjl->bil", 64, (4,)),
    _einsum("8-8", "ab,bc,cd,de,ef,fg,gh,hi->ai", 8),
    *(_broadcast(name, *case) for name, case in _REPORTED.items()),
    *(_broadcast(name, *case, gradients=True) for name, case in _REPORTED.items()),
    *(_square(n, "log_product_gradients") for n in (256, 1024)),
    _square(1024, "log_product_gradients", dtype="float64"),
    _square(512, "log_product_gradients", sd=1000),
    _product("logmatmulexp-8", (8, 8), (8, 8), "log_product_gradients"),
    *(
        _product(f"range-{sd}", (256, 256), (256, 256), sd=sd, group=RANGE, devices=("cpu",))
        for sd in SPREADS
    ),
)
