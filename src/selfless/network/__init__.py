"""Facts about any `nn.Module`: which modules are heads, hidden layers and activations, and how to call the model on a batch.

Lives here: roles of modules, layers (taps), discovery by a forward pass, wiring of neurons to weights, calling a model.
Imports nothing else of the package; importance, preservers, the keeper and the engine import it.
"""
