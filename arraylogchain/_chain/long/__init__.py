"""Long chains with time cut into segments, which are computed side by side."""
