"""Time, memory and error of this library and of other implementations.

``python -m benchmarks`` runs the table in `cases`; ``python -m benchmarks.report`` writes tables
from its record; ``python -m benchmarks.compare`` times two checkouts of this library side by side.
"""
