"""What we know of anybody's `nn.Module`: which modules are heads, hidden layers and activations, and how to call it.

Lives here: roles, layers (taps), discovery by a forward pass, wiring of neurons to weights, calling a model on a batch.
Imports nothing else of the package; importance, preservers, the keeper and the engine import it.
"""
