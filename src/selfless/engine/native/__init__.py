"""A forward pass for stacked parameters, layer by layer, with its own backward pass.

Lives here: the pass (forward), its options, its autograd functions (functions), and what the machine supports (hardware). It supports
nn.Sequential networks of common layers, also nested, which covers all networks of the paper. Only the engine imports it.
"""
