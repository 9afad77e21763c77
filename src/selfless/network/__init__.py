"""Facts about any `nn.Module`: which modules are heads, hidden layers and activations, and how to call the model on a batch.

Lives here: roles of modules, layers (taps), discovery by a forward pass, wiring of neurons to weights, calling a model.
Imports nothing.
Imported by capacity, engine, experiments, importance, integrations, keeper, models, preserve, runner, spec and trained.
"""
