"""A small BERT learns three text tasks with the Trainer of Hugging Face: all of its weights, or LoRA adapters alone; with and without EWC.

The model is made here and downloads nothing. A sentence is a row of letters; each task has an alphabet of its own, and its classes are
three parts of it. The model first learns a task that is not counted, as a pretrained one would have.

    pip install 'selfless-learning[transformers]'
    python examples/transformers_tasks.py

This is a demonstration, not evidence: the strengths were chosen on these tasks.
"""

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from selfless import EWC
from selfless.integrations.transformers import SelflessTrainerCallback

TASKS, CLASSES, LETTERS, LENGTH, SENTENCES, EPOCHS = 3, 3, 12, 12, 160, 6
STRENGTHS = {"full": 10.0, "LoRA": 30.0}
QUIET: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
Rows = list[dict[str, Tensor]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    words = 1 + (TASKS + 1) * LETTERS
    return BertForSequenceClassification(BertConfig(vocab_size=words, num_labels=CLASSES, max_position_embeddings=LENGTH, **size))


def make_task(task: int, part: str) -> Rows:
    """Sentences of 6 to 12 letters, padded with 0: half of them letters of the class, half of them of the whole alphabet of the task."""
    generator = torch.Generator().manual_seed(2 * task + (part == "test"))
    alphabet = 1 + task * LETTERS + torch.arange(LETTERS)
    rows = []
    for i in range(SENTENCES):
        label, length = i % CLASSES, int(torch.randint(6, LENGTH + 1, (), generator=generator))
        own = alphabet.view(CLASSES, -1)[label][torch.randint(LETTERS // CLASSES, (length,), generator=generator)]
        noise = alphabet[torch.randint(LETTERS, (length,), generator=generator)]
        letters = torch.where(torch.rand(length, generator=generator) < 0.5, own, noise)
        ids = nn.functional.pad(letters, (0, LENGTH - length))
        rows.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(label)})
    return rows


def train(model: nn.Module, task: int, callbacks: list[SelflessTrainerCallback]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=16, num_train_epochs=EPOCHS, learning_rate=5e-3, **QUIET)
        trainer = Trainer(model, arguments, train_dataset=make_task(task, "train"), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


@torch.no_grad()
def accuracy(model: nn.Module, rows: Rows) -> float:
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return float((model.eval()(**batch).logits.argmax(1) == batch["labels"]).float().mean())


def main() -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("full", "LoRA"):
        for method, strength in (("plain", 0.0), ("EWC", STRENGTHS[kind])):
            model, callback = make_model(), SelflessTrainerCallback(EWC(strength))
            train(model, TASKS, [])
            if kind == "LoRA":
                lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=16, target_modules=["query", "value", "dense"])
                model = get_peft_model(model, lora)
            for task in range(TASKS):
                train(model, task, [callback])
            scores = [accuracy(model, make_task(task, "test")) for task in range(TASKS)]
            name = f"{kind}, {method}"
            found[name] = sum(scores) / TASKS
            held = callback.keeper.footprint().bytes / sum(p.numel() * p.element_size() for p in model.parameters())
            print(f"{name:12} accuracy by task: {', '.join(f'{s:.0%}' for s in scores)}; average {found[name]:.1%}; ", end="")
            print(f"the keeper holds {held:.2f} copies of the model")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
