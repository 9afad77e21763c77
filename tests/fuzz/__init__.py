"""A fuzzer of everything that a user or a stranger can hand to the package: texts, flags, files, records.

`python -m tests.fuzz --seconds 600 --seed 1` runs it; `tests/test_fuzz.py` runs a short part. A case is found again by its kind and number:
`python -m tests.fuzz --kind toml --number 1234`.
"""
