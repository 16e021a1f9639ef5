"""Measurements that print their figures.  Run one with `python -m benchmarks.NAME`."""
