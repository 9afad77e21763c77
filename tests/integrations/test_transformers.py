"""SelflessTrainerCallback and SelflessMixin: a Trainer is the plain loop with the penalty in its loss; LoRA keeps adapters alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import selfless
from selfless import EWC, MAS, SI, SLNID, PackNet
from tests.example_files import load_example

transformers: Any = pytest.importorskip("transformers", reason="Transformers is not installed; make test-integrations installs it")
from selfless.importance import next_token_loss  # noqa: E402
from selfless.integrations.transformers import SelflessMixin, SelflessTrainerCallback  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WORDS, LONGEST, EPOCHS, BATCH = 20, 7, 2, 4
LAYERS = ["*intermediate_act_fn"]  # BERT's only activations that follow a layer, besides the pooler's
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": WORDS}
Rows = list[dict[str, Tensor]]


class Trainer(SelflessMixin, transformers.Trainer):  # type: ignore[misc]
    """The penalty is in the loss."""


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # its loss is a mean, which the Trainer then averages over the batches of a step
    return model


def language_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, num_key_value_heads=2))


def sentences(seed: int, *, words: bool = False, count: int = 20) -> Rows:
    """Sentences of 3 to 7 words, padded; `words`: the labels are the words themselves, −100 where there is padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        ids = F.pad(torch.randint(1, WORDS, (length,), generator=generator), (0, LONGEST - length))
        mask = (torch.arange(LONGEST) < length).long()
        labels = torch.where(mask == 1, ids, -100) if words else torch.randint(3, (), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def batches(rows: Rows) -> Rows:
    return [{k: torch.stack([row[k] for row in rows[i : i + BATCH]]) for k in rows[0]} for i in range(0, len(rows), BATCH)]


def train(folder: Path, model: Any, callback: Any, rows: Rows, kind: Any = transformers.Trainer, resume: Any = None, **options: Any) -> Any:
    settings = {"num_train_epochs": EPOCHS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), per_device_train_batch_size=BATCH, **settings, **quiet | options)
    trainer = kind(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plain_loop(model: Any, keeper: selfless.Keeper, tasks: list[Rows], accumulate: int = 1, loss: Any = None) -> None:
    """What the Trainer does: AdamW, gradients clipped at 1, a mean over the batches that share a step."""
    for rows in tasks:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
        keeper.anchor_with(optimizer)
        for epoch in range(EPOCHS):
            keeper.begin_epoch(epoch, EPOCHS)
            every = batches(rows)
            for start in range(0, len(every), accumulate):
                window = every[start : start + accumulate]
                for batch in window:
                    model.train()
                    ((model(**batch).loss + keeper.penalty(batch)) / len(window)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        keeper.consolidate(batches(rows), loss=loss)


def assert_same(one: Any, other: Any, found: selfless.Keeper, wanted: selfless.Keeper) -> None:
    assert found.tasks == wanted.tasks > 0
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer], ids=["callback", "mix-in"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_plain_loop(kind: Any, accumulate: int, tmp_path: Path) -> None:
    """Five batches in steps of two: the Trainer divides the last step of an epoch by one. Sentences are padded."""
    tasks, terms = [sentences(0), sentences(1)], (MAS(1.0), SLNID(0.1, absolute=True), LAYERS)
    one, callback = classifier(), SelflessTrainerCallback(*terms)
    for rows in tasks:
        trainer = train(tmp_path, one, callback, rows, kind, gradient_accumulation_steps=accumulate)
    other = classifier()
    keeper = selfless.attach(other, *terms)
    plain_loop(other, keeper, tasks, accumulate)
    assert_same(one, other, callback.keeper, keeper)
    assert (callback.keeper.injector is None) == (kind is Trainer)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["selfless/inhibition"] > 0 and entry["selfless/anchor"] >= 0 for entry in history)


@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer], ids=["callback", "mix-in"])
def test_a_causal_language_model(kind: Any, tmp_path: Path) -> None:
    """The Trainer divides the loss by the words of a whole step; EWC measures the loss of the next word."""
    tasks = [sentences(0, words=True), sentences(1, words=True)]
    one, callback = language_model(), SelflessTrainerCallback(EWC(10.0))
    for rows in tasks:
        train(tmp_path, one, callback, rows, kind)
    other = language_model()
    keeper = selfless.attach(other, EWC(10.0))
    plain_loop(other, keeper, tasks, loss=next_token_loss)
    assert_same(one, other, callback.keeper, keeper)


def test_lora_keeps_the_adapters_alone(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="PEFT is not installed; make test-integrations installs it")
    model = peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value", "dense"]))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    callback = SelflessTrainerCallback(MAS(1.0), SLNID(0.1, absolute=True), LAYERS)
    for seed in range(2):
        train(tmp_path, model, callback, sentences(seed))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(callback.keeper.state["omega"]) == set(callback.keeper.state["anchor"]) == set(trained)
    assert any("lora_A" in name for name in trained)
    assert sum(p.numel() for p in trained.values()) < sum(p.numel() for p in model.parameters()) / 2
    assert callback.keeper.footprint().bytes <= 2.1 * sum(p.numel() * p.element_size() for p in trained.values())
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in frozen.items())
    assert callback.keeper.log()["anchor"] == 0  # θ is θ* now


@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("method", [SI(1.0), PackNet(0.5)], ids=str)
@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer], ids=["callback", "mix-in"])
def test_a_checkpoint_in_the_middle_of_an_epoch(kind: Any, method: Any, step: int, tmp_path: Path) -> None:
    first, second = sentences(0), sentences(1)
    one, callback = classifier(), SelflessTrainerCallback(method, SLNID(0.1, absolute=True), LAYERS)
    train(tmp_path / "0", one, callback, first, kind)
    train(tmp_path / "1", one, callback, second, kind, save_strategy="steps", save_steps=step)
    other, resumed = classifier(), SelflessTrainerCallback(method, SLNID(0.1, absolute=True), LAYERS)
    train(tmp_path / "1", other, resumed, second, kind, resume=str(tmp_path / "1" / f"checkpoint-{step}"))
    assert_same(other, one, resumed.keeper, callback.keeper)


def test_a_checkpoint_without_the_state_of_the_callback(tmp_path: Path) -> None:
    kind, second = transformers.Trainer, sentences(1)
    train(tmp_path / "1", classifier(), SelflessTrainerCallback(SI(1.0)), second, kind, save_strategy="steps", save_steps=7)
    (tmp_path / "1" / "checkpoint-7" / "selfless.safetensors").unlink()
    again = SelflessTrainerCallback(SI(1.0))
    with pytest.raises(ValueError, match="is missing; call"):
        train(tmp_path / "1", classifier(), again, second, kind, resume=str(tmp_path / "1" / "checkpoint-7"))


def test_half_precision_and_a_task_that_the_user_ends(tmp_path: Path) -> None:
    model, callback = classifier(), SelflessTrainerCallback(MAS(1.0), SLNID(0.1, absolute=True), LAYERS, end_with_training=False)
    train(tmp_path, model, callback, sentences(0), bf16=True)
    assert callback.keeper.tasks == 0
    callback.end_task(batches(sentences(0)))
    assert callback.keeper.tasks == 1
    with callback.evaluating(0) as found:
        assert found is model


def test_the_mix_in_needs_the_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a SelflessTrainerCallback"):
        train(tmp_path, classifier(), transformers.TrainerCallback(), sentences(0), Trainer)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed; make test-integrations installs it")
    example = load_example("transformers_tasks")
    example.SENTENCES, example.EPOCHS, example.TASKS = 48, 1, 2  # too short to say anything about accuracy
    assert set(example.main()) == {"full, plain", "full, EWC", "LoRA, plain", "LoRA, EWC"}
    lines = capsys.readouterr().out.splitlines()
    copies = [float(re.findall(r"holds ([\d.]+) copies", line)[0]) for line in lines if "holds" in line]
    assert copies[1] > 1.9
    assert copies[3] < 1.0
