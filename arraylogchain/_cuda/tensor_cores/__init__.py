"""What is also computed over tensor cores; the device decides where, see `_cuda.tuning`."""
