"""The message for an extra that is not installed."""

from __future__ import annotations

NEEDS = {  # extra → what it is
    "lightning": "Lightning",
    "transformers": "Transformers",
    "avalanche": "Avalanche",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
}


def missing(extra: str) -> ImportError:
    """Return the error for a missing extra, with the line that installs it."""
    return ImportError(f"{NEEDS[extra]} is not installed; write: pip install 'selfless-learning[{extra}]'")
