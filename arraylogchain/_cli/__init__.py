"""What ``python -m arraylogchain`` does: tell what is here, solve the forum's case."""
