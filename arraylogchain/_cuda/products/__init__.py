"""Matrix products by kernels, and their gradients: which are launched, on what, in which order."""
