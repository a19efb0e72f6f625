"""Matrix products and their derivatives on arrays, in tiles that fit a workspace.

All operations take the context and the fold of both operands. `tiling` chooses tiles and walks over
them. `factors` has operands of the log product as exponentials and what is taken off them,
`certified` the product, and what it cannot prove one by one, `gradients` sums over its shares.
`linear` and `maxplus` are the plain and the max-plus product with their gradients, and `chainexp`
multiplies many matrices. Second derivatives are made of these where torch asks for them.
"""
