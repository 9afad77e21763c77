"""Importance of each parameter (Ω) and each neuron (α) for what was learned: exact per sample, in one pass over the data.

    MAS   Ω = mean_m |∂‖f(x_m)‖²/∂θ|        α = mean_m |∂‖f(x_m)‖²/∂n|
    EWC   Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²  α = mean_m |∂ log p(y_m|x_m)/∂n|

n is the pre-activation of a neuron. Lives here: the objectives, the loop over the data, closed forms, per-sample gradients.
Imports distributed, functional and network.
Imported by bench, capacity, engine, experiments, integrations, keeper and preserve.
"""

from selfless.importance.eager import ewc, mas, measure, neurons
from selfless.importance.loop import Estimator, Importance
from selfless.importance.objectives import Fisher, FunctionNorm, LayerNorms, LogLikelihood, Loss, Objective, OwnLoss, next_token_loss

__all__ = [
    "Estimator", "Fisher", "FunctionNorm", "Importance", "LayerNorms", "LogLikelihood", "Loss", "Objective", "OwnLoss", "ewc", "mas",
    "measure", "neurons", "next_token_loss",
]  # fmt: skip
