"""In which order to multiply a sequence of rectangular matrices."""

from __future__ import annotations

from collections.abc import Sequence


def multiplication_order(sizes: Sequence[int]) -> list[list[int]]:
    """Return where to split each part of a product so that multiplications are fewest.

    Parameters
    ----------
    sizes : sequence of int
        Matrix i is sizes[i] by sizes[i + 1].

    Returns
    -------
    list of list of int
        ``split[i][j]`` is the last matrix of the left part of the product of matrices i ... j.

    References
    ----------
    Cormen, Leiserson, Rivest, Stein, Introduction to Algorithms, 3rd edition, section 15.2.

    Examples
    --------
    >>> multiplication_order([10, 100, 5, 50])[0][2]  # (A B) C: 7500 multiplications, not 75000
    1
    """
    n = len(sizes) - 1
    cost = [[0] * n for _ in range(n)]
    split = [[0] * n for _ in range(n)]
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            choices = (
                (cost[i][k] + cost[k + 1][j] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
                for k in range(i, j)
            )
            cost[i][j], split[i][j] = min(choices)
    return split
