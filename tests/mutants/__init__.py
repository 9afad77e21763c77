"""Mutation testing: small faults are put into the code, one at a time, and the tests must find each of them.

`cover` finds out which test runs which line, `plan` lists the faults with the operators of mutmut, `running` tries them in forks of a
process that has imported torch, and `__main__` is the command. Only `cover` and `plan` need coverage and mutmut.
"""
