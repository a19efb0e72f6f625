"""Sums over all paths of a chain, one state after another.

`steps` arranges the inputs, `pieces` chooses the sizes of tiles and blocks, and `recursion` takes
states through the matrices of the steps, in one of two `forms`. `evaluate` does so
for whole chains, and cuts long ones into segments of time.
"""
