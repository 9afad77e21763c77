"""Benchmarks: time and memory of training, importance and the penalty on this machine (`selfless bench`).

There is one file for each part that is measured. A ratio compares `engine` with `eager`; `timing` measures, `table` and `plots` show the
result. The scripts in benchmarks/ use it too.

Imports data, engine, files, functional, importance, keeper, metrics, models, preserve, report, runner, sparsify, spec and workers.
Imported by cli.
"""
