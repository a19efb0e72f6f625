"""Dask arrays: functions of blocks, which workers compute in memory; nothing here is computed."""
