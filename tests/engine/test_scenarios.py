"""What is known when a task is evaluated: the engine's columns against loops over the test images."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from selfless import GPM, HAT, IMM, MAS, LwF, NoPreserver, NoSparsifier, PackNet, Run
from selfless.data import stream
from selfless.engine import rng
from selfless.engine.learner import Learner
from selfless.engine.scenario import arrange
from selfless.models import build
from selfless.runner.plan import fleets
from tests import oracles

pytestmark = pytest.mark.slow


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": NoSparsifier(), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | changes))


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
@pytest.mark.parametrize("preserve", [NoPreserver(), LwF(1.0)], ids=str)
def test_columns_and_labels_are_those_of_the_scenario(tasks_npz: str, scenario: Any, preserve: Any) -> None:
    """The last row, image by image, from the trained network: three tasks of two classes."""
    learner = Learner([small(tasks_npz, preserve=preserve, scenario=scenario)])
    result = learner.learn()[0]
    outputs = 2 if scenario == "domain" else 6
    model = build("mlp-12", outputs=outputs, input_shape=(1, 6, 6))
    model.load_state_dict({n: p[0] for n, p in learner.fleet.params.items()})
    for u, task in enumerate(stream(tasks_npz).tasks):
        x, y = task.test.resident().batch(torch.arange(len(task.test)))
        hits = 0
        for image, label in zip(x, y, strict=True):
            z = model(image[None])[0]
            if scenario == "task":
                hits += int(z[2 * u : 2 * u + 2].argmax()) == int(label) - 2 * u
            else:
                hits += int(z.argmax()) == (int(label) if scenario == "class" else int(label) - 2 * u)
        assert result.accuracy[-1, u] == pytest.approx(hits / len(x), abs=1e-6)


def test_joint_training_gives_no_gradient_to_the_heads_of_other_tasks(tasks_npz: str) -> None:
    """However large their outputs are: a sample is classified among the columns of its own head."""
    learner = Learner([small(f"joint-{tasks_npz}", preserve=NoPreserver())])
    task = learner.streams[0].tasks[0]
    learner.fleet.begin_task(learner.load([task.train]), task.heads, 6)
    z = torch.full((1, 3, 6), 50.0)
    z[0, :, 2:4] = torch.tensor([[0.0, 0.0], [1.0, -1.0], [-90.0, -90.0]])
    learner.fleet.step.begin_epoch(0, 0)
    _, grads = learner.fleet.step.task_loss(z, torch.tensor([[2, 3, 2]]))
    p = z[0, :, 2:4].softmax(-1) - F.one_hot(torch.tensor([0, 1, 0]), 2)
    assert_close(grads[0, :, 2:4], 0.05 / 3 * p)
    assert grads[0, :, [0, 1, 4, 5]].abs().max() == 0
    assert_close(learner.fleet.step.loss_sum, -z[0, :, 2:4].log_softmax(-1)[[0, 1, 2], [0, 1, 0]].sum()[None])


def test_class_is_evaluated_among_the_classes_seen_so_far_and_trained_among_them(tasks_npz: str) -> None:
    made = arrange(stream(tasks_npz), "class")
    assert [task.heads for task in made.tasks] == [(range(2),), (range(4),), (range(6),)]
    result = Learner([small(tasks_npz, scenario="class", preserve=NoPreserver(), epochs=6)]).learn()[0]
    assert result.accuracy[0, 0] > 0.8  # two classes seen, two columns
    assert result.accuracy[-1, 2] > 0.8
    assert result.accuracy[-1, :2].max() < 0.3  # plain fine-tuning gives every image a class of the newest task
    joint = Learner([small(f"joint-{tasks_npz}", scenario="class", preserve=NoPreserver(), epochs=20)]).learn()[0]
    assert joint.accuracy.shape == (1, 3)
    assert joint.accuracy.min() > 0.8  # among all six


def test_domain_gives_all_tasks_the_same_outputs(tasks_npz: str) -> None:
    made = arrange(stream(tasks_npz, held_out=0.2), "domain")
    assert made.outputs == 2
    for task in made.tasks:
        assert task.heads == (range(2),)
        assert task.held_out is not None
        for part in (task.train, task.test, task.held_out):
            assert sorted(set(part.targets.tolist())) == [0, 1]
    joint = arrange(stream(f"joint-{tasks_npz}"), "domain")
    assert sorted(set(joint.tasks[0].train.targets.tolist())) == [0, 1]
    result = Learner([small(f"joint-{tasks_npz}", scenario="domain", preserve=NoPreserver(), epochs=30)]).learn()[0]
    assert result.accuracy.min() > 0.8
    made = stream(tasks_npz)
    uneven = (dataclasses.replace(made.tasks[0], heads=(range(3),)), *made.tasks[1:])
    with pytest.raises(ValueError, match="same number of classes"):
        arrange(dataclasses.replace(made, tasks=uneven, evaluate=uneven), "domain")


@pytest.mark.parametrize("scenario", ["domain", "class"])
@pytest.mark.parametrize("preserve", [PackNet(0.5), HAT(0.1)], ids=str)
def test_methods_that_need_the_task_say_so(tasks_npz: str, scenario: Any, preserve: Any) -> None:
    with pytest.warns(UserWarning, match=f"in the {scenario} scenario the task is not known"):
        learner = Learner([small(tasks_npz, preserve=preserve, scenario=scenario)])
    result = learner.learn()[0]
    assert result.status == "done"


@pytest.mark.parametrize("preserve", [IMM(0.1), MAS(0.1)], ids=str)
def test_methods_that_hold_weights_say_what_to_expect_where_classes_add_up(tasks_npz: str, preserve: Any) -> None:
    with pytest.warns(UserWarning, match="expect old tasks to be lost"):
        Learner([small(tasks_npz, preserve=preserve, scenario="class")])
    for scenario in ("task", "domain"):  # one network for all: nothing to say
        Learner([small(tasks_npz, preserve=preserve, scenario=scenario)])
    Learner([small(tasks_npz, preserve=LwF(0.1), scenario="class")])
    Learner([small(f"joint-{tasks_npz}", preserve=preserve, scenario="class")])  # all classes at once


def test_a_warm_up_that_has_no_effect_is_said_to_have_none(tasks_npz: str) -> None:
    for scenario in ("domain", "class"):
        with pytest.warns(UserWarning, match=f"in the {scenario} scenario there is none"):
            Learner([small(tasks_npz, preserve=LwF(0.1, warmup=1), scenario=scenario)])
    Learner([small(tasks_npz, preserve=LwF(0.1, warmup=1))])


def test_the_default_scenario_leaves_keys_and_files_as_they_were(tasks_npz: str) -> None:
    run = small(tasks_npz)
    assert "scenario" not in json.loads(run.canonical())
    assert Run().key == "a196ecd2be91cc11"  # as it was before there were scenarios
    other = small(tasks_npz, scenario="class")
    assert other.key != run.key
    assert Run.from_dict(json.loads(json.dumps(other.as_dict()))) == other
    assert len(fleets([run, other])) == 2
    with pytest.raises(ValueError, match="task, domain, class"):
        small(tasks_npz, scenario="open")


def test_a_member_of_a_fleet_is_the_run_alone_in_the_class_scenario_too(tasks_npz: str) -> None:
    runs = [small(tasks_npz, preserve=LwF(0.5), scenario="class", seed=s) for s in range(2)]
    together = Learner(runs).learn()
    for m, run in enumerate(runs):
        alone = Learner([run]).learn()[0]
        assert abs(together[m].accuracy - alone.accuracy).max() <= 0.026


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "outputs", "heads", "old"),  # the columns each task is trained among, and those of the old tasks, each once
    [
        ({}, 6, [range(2), range(2, 4), range(4, 6)], [[], [range(2)], [range(2), range(2, 4)]]),
        ({"stream_options": {"head": "shared"}}, 6, [range(6)] * 3, [[], [range(6)], [range(6)]]),
        ({"scenario": "domain"}, 2, [range(2)] * 3, [[], [range(2)], [range(2)]]),
        ({"scenario": "class"}, 6, [range(2), range(4), range(6)], [[], [range(2)], [range(4)]]),
    ],
    ids=["own", "shared", "domain", "class"],
)
def test_lwf_compares_each_old_column_once(tasks_npz: str, change: Any, outputs: int, heads: list[range], old: list[list[range]]) -> None:
    """A run against the loop written out: what an old column costs does not grow with the tasks that share it."""
    run = small(tasks_npz, preserve=LwF(3.0, damped=False), batch=10, lr=0.1, **change)
    model = build(run.model, outputs=outputs, input_shape=(1, 6, 6), seed=run.seed)
    before = copy.deepcopy(model)
    for t, task in enumerate(stream(tasks_npz).tasks):
        data, head = task.train.resident(), heads[t]
        opt = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
        for epoch in range(run.epochs):
            order = rng.order(rng.stream_key(torch.tensor([run.seed]), "order", t, epoch), len(data))[0]
            for x, y in (data.batch(index) for index in order.split(run.batch)):
                z, was = model(x), before(x).detach()
                label = y - 2 * t if outputs == 2 else y - head.start
                loss = F.cross_entropy(z[:, head.start : head.stop], label)
                cost = sum(oracles.lwf(z[:, h.start : h.stop], was[:, h.start : h.stop], 2.0) for h in old[t])
                opt.zero_grad()
                (loss + 3.0 * cost).backward()
                opt.step()
        before = copy.deepcopy(model)
    learner = Learner([run])
    learner.learn()
    for name, p in model.named_parameters():
        assert_close(learner.fleet.params[name][0], p, rtol=1e-3, atol=1e-4)


def test_fleets_keep_apart_what_cannot_train_together(tasks_npz: str) -> None:
    """GPM's share of energy and the epochs of methods with phases are common to a fleet; other strengths are a member's own."""
    assert len(fleets([small(tasks_npz, preserve=GPM(s)) for s in (0.25, 0.5, 0.5)])) == 2
    assert len(fleets([small(tasks_npz, preserve=PackNet(s)) for s in (0.25, 0.5, 0.5)])) == 1
    assert len(fleets([small(tasks_npz, preserve=LwF(s)) for s in (0.5, 1.0)])) == 1
    assert len(fleets([small(tasks_npz, preserve=HAT(s)) for s in (0.1, 0.5)])) == 1
    assert len(fleets([small(tasks_npz, preserve=LwF(1.0), epochs=e) for e in (2, 3)])) == 2
    assert len(fleets([small(tasks_npz, preserve=MAS(1.0), epochs=e) for e in (2, 3)])) == 1


def test_hat_ends_with_the_weights_and_gates_of_its_best_epoch(tasks_npz: str) -> None:
    fixed = {"select": "held-out", "held_out": 0.3, "epochs": 6, "lr": 0.2, "batch": 10, "seed": 1}
    runs = [small(tasks_npz, preserve=HAT(strength, s_max=20.0), **fixed) for strength in (0.1, 1.0)]
    results = Learner(runs).learn()
    best = [[max(epoch["held_out"] for epoch in task) for task in result.history] for result in results]
    last = [[task[-1]["held_out"] for task in result.history] for result in results]
    assert best != last  # else the last epoch would do
    for result, scores in zip(results, best, strict=True):
        assert result.held_out is not None
        assert result.held_out.diagonal().tolist() == pytest.approx(scores)
        assert result.held_out[-1].tolist() == pytest.approx(scores)  # nothing is forgotten
