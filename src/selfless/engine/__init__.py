"""The engine: trains every run as a fleet of one or more members, on a CPU or a GPU.

Lives here: the loop (learner), the fleet and its step, the stacked networks (stack, native, kernels), preservers and sparsifiers in a step
(part, inhibition), checkpoints.

Imports activations, capacity, data, files, functional, importance, models, network, preserve, sparsify, spec and terms.
Imported by bench, cli, integrations, runner and testing.
"""
