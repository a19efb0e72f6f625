"""Dask arrays: graphs of functions of blocks, which workers compute in memory."""
