"""What callers give: checks, lengths, steps of different numbers of states, and what is printed."""
