"""SelflessPlugin: an Avalanche strategy is the plain loop; models that grow; beside its own MAS plugin."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import selfless
from selfless import EWC, MAS, SI, SLNID, LwF, PackNet
from tests.example_files import load_example

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Avalanche and its dependencies
    avalanche: Any = pytest.importorskip("avalanche", reason="Avalanche is not installed; make test-integrations installs it")
    from avalanche.benchmarks import benchmark_from_datasets, with_classes_timeline, with_task_labels
    from avalanche.benchmarks.utils import AvalancheDataset
    from avalanche.benchmarks.utils.data_attribute import DataAttribute
    from avalanche.models import IncrementalClassifier, MultiHeadClassifier, MultiTaskModule
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive

    from selfless.integrations.avalanche import SelflessPlugin, TaskForward, grown

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:avalanche", "ignore::DeprecationWarning", "ignore::FutureWarning")
EPOCHS, BATCH, TASKS = 2, 10, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.classifier = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.fc(x)))


class Growing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = IncrementalClassifier(12, 2)


class Heads(MultiTaskModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 12)
        self.classifier = MultiHeadClassifier(12, 2, masking=False)  # its masks need lists of classes, not the sets of these experiences

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        return self.classifier(F.relu(self.fc(x)), task_labels)


def data(task: int, classes: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(task)
    y = torch.arange(40) % 2
    x = torch.randn(40, 6, generator=generator) + 2 * y[:, None] * torch.randn(6, generator=generator)
    return TensorDataset(x, y + classes)


def benchmark(*, new_classes: bool = False, heads: bool = False) -> Any:
    sets = []
    for task in range(TASKS):
        one = data(task, 2 * task if new_classes else 0)
        targets = DataAttribute(one.tensors[1].tolist(), "targets")
        labels = DataAttribute([task if heads else 0] * len(one), "targets_task_labels", use_in_getitem=True)
        sets.append(AvalancheDataset([one], data_attributes=[targets, labels]))
    return with_classes_timeline(with_task_labels(benchmark_from_datasets(train=sets, test=sets)))


def strategy(model: nn.Module, *plugins: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"train_mb_size": BATCH, "train_epochs": EPOCHS, "eval_mb_size": 40, "evaluator": EvaluationPlugin()} | options
    return Naive(model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), plugins=list(plugins), **settings)


def learn(kind: Any, plugin: SelflessPlugin, stream: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    found = strategy(model, plugin, **options)
    for experience in stream.train_stream:
        found.train(experience, shuffle=False)
    return model


@pytest.mark.parametrize("preserve", [MAS(1.0), EWC(10.0), SI(1.0), LwF(1.0), PackNet(0.3)], ids=lambda term: term.name)
def test_a_strategy_is_the_plain_loop(preserve: Any) -> None:
    plugin = SelflessPlugin(preserve, SLNID(0.1))
    model = learn(Net, plugin, benchmark())
    torch.manual_seed(0)
    other = Net()
    keeper = selfless.attach(other, preserve, SLNID(0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    keeper.anchor_with(optimizer)
    for task in range(TASKS):
        x, y = data(task, 0).tensors
        batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        if task == 0:  # Avalanche makes the state of the optimizer new before the first experience alone
            optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
        for epoch in range(EPOCHS):
            keeper.begin_epoch(epoch, EPOCHS, batches=len(batches))
            for batch in batches:
                loss = F.cross_entropy(other(batch[0]), batch[1]) + keeper.penalty(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keeper.consolidate(batches)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-5)
    assert plugin.keeper.tasks == keeper.tasks == TASKS
    torch.testing.assert_close(plugin.keeper.states, keeper.states, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("preserve", [MAS(1.0), EWC(10.0), SI(1.0)], ids=lambda term: term.name)
def test_new_classes_in_one_head(preserve: Any) -> None:
    """The head grows from two to six classes. Old rows keep their importance, and a strong anchor keeps them where they were."""
    plugin, stream = SelflessPlugin(preserve, SLNID(0.1)), benchmark(new_classes=True)
    torch.manual_seed(0)
    model = Growing()
    found = strategy(model, plugin)
    for task, experience in enumerate(stream.train_stream):
        found.train(experience, shuffle=False)
        weight, omega = "classifier.classifier.weight", plugin.keeper.state["omega"]
        assert omega[weight].shape == (2 * task + 2, 12)
        assert plugin.keeper.log()["drift"] == 0
        assert bool((omega[weight][: 2 * task + 2].sum(1) > 0).all())
    assert plugin.keeper.tasks == TASKS


def test_a_state_grows_with_its_parameter() -> None:
    old, new = nn.Linear(3, 2), nn.Linear(3, 4)
    state = {"omega": {"weight": torch.rand(2, 3)}, "anchor": {"weight": old.weight.detach()}}
    found = grown(MAS(1.0), state, dict(new.named_parameters()))
    torch.testing.assert_close(found["omega"]["weight"], torch.cat([state["omega"]["weight"], torch.zeros(2, 3)]))
    torch.testing.assert_close(found["anchor"]["weight"], torch.cat([old.weight, new.weight[2:]]).detach())
    assert grown(MAS(1.0), state, dict(old.named_parameters())) == state
    assert grown(LwF(1.0), {}, {}) == {}


@pytest.mark.parametrize("preserve", [MAS(1.0), LwF(1.0)], ids=lambda term: term.name)
def test_a_head_for_each_task(preserve: Any) -> None:
    plugin = SelflessPlugin(preserve, SLNID(0.1), heads=[f"classifier.classifiers.{t}" for t in range(TASKS)])
    learn(Heads, plugin, benchmark(heads=True))
    assert [forward.task for forward in plugin.keeper.forwards] == [0, 1, 2]
    assert set(plugin.keeper.taps) == {"fc"}
    if isinstance(preserve, MAS):
        assert {name for name in plugin.keeper.state["omega"] if name.endswith(f".{TASKS - 1}.classifier.weight")}


def test_an_old_task_is_evaluated_with_its_own_parameters() -> None:
    """PackNet forgets nothing, if each experience is evaluated with its own mask."""
    plugin, stream = SelflessPlugin(PackNet(0.3)), benchmark()
    torch.manual_seed(0)
    model = Net()
    found = strategy(model, plugin)
    seen: list[Tensor] = []
    x = data(0, 0).tensors[0]
    model.classifier.register_forward_hook(lambda _module, _inputs, output: seen.append(output) if not model.training else None)
    outputs = []
    for experience in stream.train_stream:
        found.train(experience, shuffle=False)
        before = [p.clone() for p in model.parameters()]
        seen.clear()
        found.eval(stream.test_stream[:1])
        assert all(map(torch.equal, before, model.parameters()))
        outputs.append(seen[-1])
    assert len(outputs[0]) == len(x)
    torch.testing.assert_close(outputs[0], outputs[-1])


def test_a_copy_has_the_state_and_attaches_again() -> None:
    plugin = SelflessPlugin(LwF(1.0))
    model = learn(Net, plugin, benchmark())
    copied = pickle.loads(pickle.dumps(plugin.attachment))
    plugin.keeper.detach()
    keeper = copied.attach(model)
    assert keeper.tasks == TASKS
    assert keeper.forwards == [TaskForward(0)] * TASKS


def test_the_example_prints_both_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(data(task, 0), data(task, 0)) for task in range(2)]
    found = load_example("avalanche_permuted").main(pairs, epochs=2, width=16)
    assert set(found) == {"Naive", "Avalanche's MAS", "MAS + SLNID"}
    assert "Avalanche's MAS  average" in capsys.readouterr().out
