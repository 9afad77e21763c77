"""Benchmarks: what training, importance and the penalty cost on this machine (`selfless bench`).

One file for each part that is measured; `engine` and `eager` are the two sides of every ratio, `timing` the clock, `table` and `plots` show
the result. May import everything except `experiments` and `cli`; only `cli` and the scripts in benchmarks/ import it.
"""
