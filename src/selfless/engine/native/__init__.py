"""A forward pass written for stacked parameters, layer by layer, with its own backward pass.

Lives here: the pass (forward), its options, its autograd functions, and what the machine offers (hardware). For plain nn.Sequential
networks of the usual layers, also nested, as all of the paper's are. Only the engine imports it.
"""
