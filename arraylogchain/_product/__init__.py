"""Matrix products, in tiles that fit a workspace.

`tiling` chooses the tiles, `tiled` walks over them, and a kernel computes one: `certified` for the
log product, with `exact` for what it cannot prove, `kernels` for the linear and the max-plus
product. `sequence` orders and multiplies many rectangular matrices.
"""
