"""The trained network of a run: an `nn.Module` with its weights, its predictions for pictures, and files for other programs.

Lives here: `network` (a module that takes images as the data set has them), `record` (what a run keeps for it), `predicting` (pictures →
classes and probabilities), `export` (safetensors, ONNX, torch.export; each file is read again and compared).

Imports data, files, inputs, models, network and preserve. Imported by cli, runner and spec.
"""

from selfless.trained.export import FORMATS, export
from selfless.trained.network import TrainedNetwork
from selfless.trained.predicting import Prediction, predict
from selfless.trained.record import described, digest, find_task, model_of, read_tensors

__all__ = ["FORMATS", "Prediction", "TrainedNetwork", "described", "digest", "export", "find_task", "model_of", "predict", "read_tensors"]
