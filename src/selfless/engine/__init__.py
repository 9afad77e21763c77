"""The engine: every run is a fleet, of one or of hundreds, on a CPU or a GPU.

Lives here: the loop (learner), the fleet and its step, the stacked networks (stack, native, kernels), the preservers' and sparsifiers' part
of a step, checkpoints. Imports terms, data, models and spec; the runner, experiments and benchmarks import it.
"""
