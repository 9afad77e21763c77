"""Benchmarks: time and memory of training, importance and the penalty on this machine (`selfless bench`).

There is one file for each part that is measured. A ratio compares `engine` with `eager`; `timing` measures, `table` and `plots` show the
result. May import everything except `experiments` and `cli`; only `cli` and the scripts in benchmarks/ import it.
"""
