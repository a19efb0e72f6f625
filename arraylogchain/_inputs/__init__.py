"""What callers give: checks, lengths, lists of arrays to pad, and what is printed."""
