"""Benchmarks: what kvpeer costs, as ratios to a reference that is measured beside it in the same run.

`rows` is the one form in which every benchmark of the project writes its results; `rounds` is how product and
reference take turns and how numbers are made of that. Both are pure. `local` is the benchmark of one machine. What is
measured, and how to read it: docs/benchmarks.md.
"""

from kvpeer.bench.rounds import Comparison, Experiment, measure
from kvpeer.bench.rows import Budget, Row, decode_rows, encode_rows

__all__ = ["Budget", "Comparison", "Experiment", "Row", "decode_rows", "encode_rows", "measure"]
