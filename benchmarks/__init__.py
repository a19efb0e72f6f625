"""Time, memory and error of this library beside other ways to compute the same.

``python -m benchmarks`` runs the table in `cases`; ``python -m benchmarks.report`` writes tables
from what it measured; ``python -m benchmarks.compare`` times two checkouts of this library side by
side.
"""
