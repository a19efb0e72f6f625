"""The way back through chains: gradients, posterior weights, entropy."""
