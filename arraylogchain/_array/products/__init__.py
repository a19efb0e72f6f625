"""Matrix products and their derivatives, in tiles that fit a workspace.

`tiling` chooses the tiles. `linear` multiplies over groups of axes where the operands lie. For the
other products `tiled` walks over the tiles, and a kernel computes one: `certified` for the log
product, with `exact` for what it cannot prove, `kernels` for the max-plus product. `sequence`
orders and multiplies many rectangular matrices. `factors` has what the log product shares with its
derivatives.

`gradients` has the derivatives of the linear and the log product; those of the latter are sums over
`posterior` weights in factors, over `exact_posterior` ones entry by entry, put together in
`tile_posterior`. `maxplus_gradients` and `chain_gradients` have those of the other products.
"""

from arraylogchain._array.products.temporary import logmatmulexp as logmatmulexp
