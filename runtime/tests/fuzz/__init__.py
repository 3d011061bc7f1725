"""Fuzz targets of the parsers in Python, and the kept inputs of all targets (docs/testing.md).

A target is a module with `take(data)`: whatever the bytes are, it returns, and raises only when a promise was broken.
Only `__main__` needs the fuzzer; the kept inputs are run by `test_kept_inputs`.
"""
