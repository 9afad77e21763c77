"""Callbacks and plugins for other people's training loops, and trackers of experiments.

    lightning      SelflessCallback, for a Lightning Trainer
    transformers   SelflessTrainerCallback and SelflessMixin, for the Trainer of Hugging Face, with PEFT too
    avalanche      SelflessPlugin, for an Avalanche strategy
    trackers       open_tracker, for TensorBoard, Weights & Biases and MLflow

Each needs its extra, as in `pip install 'selfless-learning[lightning]'`, and imports it when it is used.
Imports engine, importance, keeper, network, preserve and spec. Imported by cli.
"""
