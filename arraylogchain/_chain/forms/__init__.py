"""States, and steps from one to the next, in scaled form and in logs."""
