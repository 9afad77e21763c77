"""The engine: trains every run as a fleet of one or more members, on a CPU or a GPU.

Lives here: the loop (learner), the fleet and its step, the stacked networks (stack, native, kernels), preservers and sparsifiers in a step
(part, inhibition), checkpoints. Imports terms, data, models and spec; the runner, experiments and benchmarks import it.
"""
