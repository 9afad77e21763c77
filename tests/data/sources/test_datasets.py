"""Streams of data sets: torch, arrays, lists, Hugging Face, Continuum; and what is said where one cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import selfless
from selfless.data import Stream, from_arrays
from selfless.data.given import digest_stream


def images(n: int = 24, seed: int = 0, size: tuple[int, ...] = (4, 5, 3)) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (n, *size)).astype(np.uint8)


class Pictures(Dataset[Any]):
    """Pictures, as torchvision gives them: labels 0 … 3 with names."""

    classes = ("ant", "bee", "cat", "dog")

    def __init__(self, seed: int = 0, labels: tuple[int, ...] = (0, 1, 2, 3), n: int = 24) -> None:
        self.x, self.y = images(n, seed), [labels[i % len(labels)] for i in range(n)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return Image.fromarray(self.x[i]), self.y[i]


def inputs(made: Stream, t: int, half: str = "train") -> torch.Tensor:
    return torch.cat([chunk for part in getattr(made.tasks[t], half).parts for chunk in part.chunks()])


# ---- one path ----------------------------------------------------------------------------------------------------------------
def test_every_kind_of_data_set_gives_the_same_stream() -> None:
    x, y = images(), np.arange(24) % 2
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    items = [(x[i], int(y[i])) for i in range(24)]
    dicts = [{"x": torch.from_numpy(x[i]), "y": torch.tensor(y[i]), "more": 3} for i in range(24)]
    pictures = [(Image.fromarray(x[i]), np.int64(y[i])) for i in range(24)]
    halves = ConcatDataset([Subset(tensors, range(12)), Subset(tensors, range(12, 24))])
    kinds: list[Any] = [(x, y), (torch.from_numpy(x), y.tolist()), tensors, items, dicts, pictures, halves]
    made = [selfless.stream([(kind, kind), (kind, kinds[0])]) for kind in kinds]
    assert len({digest_stream(one) for one in made}) == 1
    both = np.concatenate([x, x]), np.concatenate([y, y]), np.repeat([0, 1], 24)
    arrays = from_arrays(*both[:2], *both[:2], task=both[2], task_test=both[2], names=["task 1", "task 2"])
    assert digest_stream(arrays) == digest_stream(made[0])
    assert [task.heads for task in made[0].tasks] == [(range(2),), (range(2, 4),)]


def test_names_held_out_sets_and_scenarios() -> None:
    x, y = images(), np.arange(24) % 2
    one, other, aside = (x, y), (255 - x, y), (x // 2, y)
    made = selfless.stream([{"train": one, "test": other, "held_out": aside, "name": "day", "classes": ["on", "off"]}], name="lamps")
    assert (made.name, made.tasks[0].name, made.tasks[0].classes) == ("lamps", "day", ("on", "off"))
    assert torch.equal(inputs(made, 0, "held_out"), torch.from_numpy(x // 2).permute(0, 3, 1, 2))
    assert torch.equal(inputs(made, 0), torch.from_numpy(x).permute(0, 3, 1, 2))
    triple = selfless.stream([(one, other, aside)], held_out=0.5)
    assert len(triple.tasks[0].train) == 24, "no share is drawn where a held-out set is given"

    class Scenario:
        """What Continuum's scenarios are: a sequence of data sets."""

        def __init__(self, *sets: Any) -> None:
            self.sets = sets

        def __len__(self) -> int:
            return len(self.sets)

        def __getitem__(self, t: int) -> Any:
            return self.sets[t]

    paired = selfless.stream(Scenario(one, other), Scenario(other, one))
    assert digest_stream(paired) == digest_stream(selfless.stream([(one, other), (other, one)]))
    assert len(selfless.stream(Scenario(one, other), Scenario(other, one), tasks=1, limit=4).tasks[0].train) == 4


def test_a_class_is_its_name() -> None:
    one, two = Pictures(0, (0, 1)), Pictures(1, (2, 3))
    own = selfless.stream([(one, one), (Subset(two, range(12)), ConcatDataset([two, two]))])
    assert [(task.classes, task.heads) for task in own.tasks] == [(("ant", "bee"), (range(2),)), (("cat", "dog"), (range(2, 4),))]
    x, y = images(), np.arange(24) % 2
    named = [{"train": (x, y), "test": (x, y), "classes": names} for names in (["ant", "bee"], ["bee", "cat"])]
    shared = selfless.stream(named, head="shared")
    assert shared.outputs == 3
    assert shared.tasks[0].classes == ("ant", "bee", "cat")
    assert shared.tasks[1].train.targets[:2].tolist() == [1, 2], "label 0 of the second task is bee, column 1"
    numbered = selfless.stream([((x, y + 7), (x, y + 7)), ((x, y + 3), (x, y + 3))], head="shared")
    assert numbered.tasks[0].classes == ("3", "4", "7", "8")
    assert selfless.stream([((x, y), (x, y))], classes=["no", "yes"]).tasks[0].classes == ("no", "yes")


def test_pictures_are_fitted_and_tokens_are_kept() -> None:
    grey = [(Image.fromarray(images(1, i, (6, 8 - i % 2))[0]), i % 2) for i in range(6)]
    made = selfless.stream([(grey, grey)], size=4, channels=3)
    assert made.input_shape == (3, 4, 4)
    ids = np.arange(24 * 7).reshape(24, 7) * 999
    made = selfless.stream([((ids, np.arange(24) % 2),) * 2], tokens=True)
    assert made.input_shape == (1, 1, 7)
    assert torch.equal(inputs(made, 0).flatten(1).long(), torch.from_numpy(ids))


def test_bytes_are_fitted_like_pictures() -> None:
    """A grey and a colour set as arrays, tensors or items, as MNIST beside CIFAR."""
    grey, colour, y = images(4, 0, (1, 8, 8)), images(4, 1, (3, 6, 10)), np.arange(4) % 2
    wanted = np.stack([np.asarray(Image.fromarray(one[0]).convert("RGB").resize((5, 5), Image.Resampling.BILINEAR)) for one in grey])
    as_pairs = [((x, y), (x, y)) for x in (grey, colour)]
    as_tensors = [(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),) * 2 for x in (grey, colour)]
    as_items = [([(x[i], int(y[i])) for i in range(4)],) * 2 for x in (grey, colour)]
    mixed = [([(grey[0], 0), (colour[0], 1)],) * 2]
    for given in (as_pairs, as_tensors, as_items):
        made = selfless.stream(given, size=5, channels=3)
        assert made.input_shape == (3, 5, 5)
        assert torch.equal(inputs(made, 0), torch.from_numpy(wanted.transpose(0, 3, 1, 2)))
    assert selfless.stream(mixed, size=np.int64(5), channels=1).input_shape == (1, 5, 5)
    turned = [([(grey[0, 0], 0), (colour[0].transpose(1, 2, 0), 1)],) * 2]  # (H, W) and (H, W, C)
    for one, other in zip(*(inputs(selfless.stream(given, size=5, channels=3), 0) for given in (mixed, turned)), strict=True):
        assert torch.equal(one, other)
    assert selfless.stream([((np.arange(8).reshape(4, 2), y),) * 2], tokens=True, size=5).input_shape == (1, 1, 2)
    assert selfless.stream(as_pairs[:1], size=8, channels=1).input_shape == (1, 8, 8)  # nothing to do
    with pytest.raises(ValueError, match=r"task 1, train has inputs \(1, 8, 8\) of float32; size= and channels= fit pictures and bytes"):
        selfless.stream([((grey.astype("float32"), y), (grey, y))], size=5)


# ---- messages ----------------------------------------------------------------------------------------------------------------
class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(3), 0)])


X, Y = images(), np.arange(24) % 2
GOOD = (X, Y)
WRONG: dict[str, tuple[Any, str]] = {
    "iterable": ([(Flow(), GOOD)], r"task 1, train is a Flow, whose items cannot be read by number; .*list\(dataset\)"),
    "loader": ([(torch.utils.data.DataLoader(Pictures()), GOOD)], "a DataLoader, which gives batches; pass its data set"),
    "half labels": ([((X, Y + 0.5), GOOD)], "task 1, train: labels must be whole numbers"),
    "half label": ([([(X[0], 0.5)], GOOD)], "label 0 is 0.5; labels must be integers"),
    "text label": ([([(X[0], "cat")], GOOD)], "label 0 is 'cat'; .*number the classes first"),
    "names": ([((X, np.array(["cat", "dog"] * 12)), GOOD)], "task 1, train: labels must be whole numbers, not text; number the names"),
    "one-hot": ([((X, np.eye(24, dtype=int)), GOOD)], "must be whole numbers, one per image"),
    "unlabelled": ([(GOOD, (X, Y - 1))], "task 1, test: a label is -1"),
    "too few labels": ([((X, Y[:3]), GOOD)], "24 inputs and 3 labels"),
    "shapes": ([([(X[0], 0), (X[0, :2], 1)], GOOD)], r"input 1 is \(2, 5, 3\) uint8, input 0 \(4, 5, 3\) uint8; convert all inputs"),
    "shapes of tasks": ([(GOOD, GOOD), ((X[:, :2], Y), GOOD)], r"agree in shape and type: task 1, train .* task 2, train \(3, 2, 5\)"),
    "types of tasks": ([(GOOD, GOOD), ((X / 255, Y), GOOD)], "uint8, task 2, train .* float32"),
    "new class": ([((X[::2], Y[::2]), GOOD)], "task 1 is tested on the class '1', of which it has no training images"),
    "text": ([([("a word", 0)], GOOD)], "an input is text; tokenize it to one length first"),
    "triple": ([([(X[0], 0, 1)], GOOD)], "an item must be .* not a tuple of 3"),
    "which": ([([{"a": X[0], "b": X[0], "label": 0}], GOOD)], "which of a, b, label is the input. Say so with input="),
    "bare arrays": ([GOOD], r"arrays come in pairs: \(\(x_train, y_train\), \(x_test, y_test\)\)"),
    "one task": (
        (TensorDataset(torch.zeros(2, 3), torch.arange(2)), GOOD),
        r"a stream is a list of tasks, also of one: \[\(train, test\)\]",
    ),
    "one half": ([(GOOD,)], r"task 1 must be \(train, test\)"),
    "unknown key": ([{"train": GOOD, "test": GOOD, "tests": GOOD}], "it has train, test, tests"),
    "some held out": ([(GOOD, GOOD), (GOOD, GOOD, GOOD)], "some tasks have a held-out set"),
    "empty": ([], "the list of tasks is empty"),
    "empty set": ([((X[:0], Y[:0]), GOOD)], "task 1, train is empty"),
    "no list": (3, "a list of tasks .*, not of a int"),
    "large numbers": ([((X.astype(int) + 999, Y), GOOD)], "tokens=True for token ids"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_said_in_a_sentence(case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        selfless.stream(given)


def test_wrong_options_are_said() -> None:
    for options, message in (
        ({"names": ["a", "b"]}, "1 tasks have the names a, b; give each task a name of its own"),
        ({"classes": ["a"]}, "labels up to 1 and 1 different class names"),
        ({"clases": ["a", "b"]}, "no option 'clases'; did you mean 'classes'"),
        ({"head": "all"}, "head must be 'own'"),
    ):
        with pytest.raises(ValueError, match=message):
            selfless.stream([(GOOD, GOOD)], **options)
    with pytest.raises(ValueError, match="1 training sets and 2 test sets"):
        selfless.stream([GOOD], [GOOD, GOOD])
    with pytest.raises(ValueError, match="some tasks name their classes"):
        selfless.stream([(GOOD, GOOD), {"train": GOOD, "test": GOOD, "classes": ["a", "b"]}], head="shared")


def test_a_random_transform_is_said() -> None:
    class Noisy(Pictures):
        def __getitem__(self, i: int) -> Any:
            return torch.randn(3), self.y[i]

    with pytest.warns(UserWarning, match="random transform"):
        selfless.stream([(Noisy(), Noisy())])


# ---- Hugging Face and Continuum ----------------------------------------------------------------------------------------------
@pytest.fixture
def hub() -> Any:
    """The library, without its progress bars."""
    library = pytest.importorskip("datasets", reason="the library of Hugging Face is not installed: pip install datasets")
    library.disable_progress_bars()
    return library


def test_hugging_face_pictures(hub: Any) -> None:
    features = hub.Features({"img": hub.Image(), "coarse": hub.Value("int64"), "label": hub.ClassLabel(names=["ant", "bee", "cat"])})
    x = images(12)
    rows = {"img": [Image.fromarray(one) for one in x], "coarse": [5] * 12, "label": [1, 2] * 6}
    data = hub.Dataset.from_dict(rows, features=features)
    split = hub.DatasetDict({"train": data, "test": data.select(range(4)), "validation": data.select(range(4, 8)), "more": data})
    made = selfless.stream([split, (data, data, data)])
    assert [task.classes for task in made.tasks] == [("bee", "cat")] * 2
    assert [len(part) for part in (made.tasks[0].train, made.tasks[0].test, made.tasks[0].held_out)] == [12, 4, 4]  # type: ignore[arg-type]
    assert torch.equal(inputs(made, 0), torch.from_numpy(x).permute(0, 3, 1, 2))
    turned = data.with_transform(lambda rows: {"pixel_values": [np.asarray(one)[::-1] for one in rows["img"]], "label": rows["label"]})
    made = selfless.stream([(turned, data.select(range(4)))])
    assert made.tasks[0].classes == ("bee", "cat")
    assert torch.equal(inputs(made, 0), torch.from_numpy(x).permute(0, 3, 1, 2).flip(2)), "as the transform gives them"
    by_name = selfless.stream([(data, data)], input="img", label="coarse")
    assert by_name.tasks[0].classes == ("5",)
    with pytest.raises(ValueError, match="has no 'image' for input=; it has img, coarse"):
        selfless.stream([(data, data)], input="image")
    with pytest.raises(TypeError, match="task 1, train is streamed"):
        selfless.stream([(data.to_iterable_dataset(), data)])


def test_hugging_face_tokens_and_numbers(hub: Any) -> None:
    ids = [[101, 2000 + i, 102, 0] for i in range(8)]
    text = hub.Dataset.from_dict({"text": ["a b"] * 8, "input_ids": ids, "attention_mask": [[1, 1, 1, 0]] * 8, "labels": [0, 1] * 4})
    made = selfless.stream([(text, text)])
    assert torch.equal(inputs(made, 0).flatten(1).long(), torch.tensor(ids))
    with pytest.raises(ValueError, match="'text' holds text; tokenize it first"):
        selfless.stream([(text, text)], input="text")
    ragged = hub.Dataset.from_dict({"input_ids": [[1], [1, 2]], "label": [0, 1]})
    with pytest.raises(ValueError, match="differ in shape; pad"):
        selfless.stream([(ragged, ragged)])
    worded = hub.Dataset.from_dict({"x": [[0.5, 1.0]] * 4, "label": ["no", "yes"] * 2})
    with pytest.raises(ValueError, match=r"class_encode_column\('label'\)"):
        selfless.stream([(worded, worded)])
    coded = worded.class_encode_column("label")
    assert selfless.stream([(coded, coded)]).tasks[0].classes == ("no", "yes")
    unlabelled = hub.Dataset.from_dict({"x": [[0.5]] * 4, "label": [-1] * 4})
    with pytest.raises(ValueError, match="a label is -1, which means that there is no label"):
        selfless.stream([(unlabelled, unlabelled)])


def test_continuum_scenarios() -> None:
    continuum = pytest.importorskip("continuum", reason="Continuum is not installed: pip install continuum")
    memory = pytest.importorskip("continuum.datasets").InMemoryDataset
    x, y = images(32), np.arange(32) % 4
    training, testing = (continuum.ClassIncremental(memory(x[s], y[s]), increment=2) for s in (slice(0, 24), slice(24, 32)))
    made = selfless.stream(training, testing)
    assert [(task.classes, len(task.train), len(task.test)) for task in made.tasks] == [(("0", "1"), 12, 4), (("2", "3"), 12, 4)]
    first = torch.from_numpy(x[:24][y[:24] < 2]).permute(0, 3, 1, 2) / 255
    assert torch.equal(inputs(made, 0), first), "as the scenario's transform, ToTensor, gives them"


# ---- Hugging Face, by a stand-in; with the library itself above ------------------------------------------------------------------
class Feature:
    def __init__(self, dtype: str = "", names: list[str] | None = None) -> None:
        self.dtype = dtype
        if names is not None:
            self.names = names


class ClassLabel(Feature): ...


class Hugging:
    """A `datasets.Dataset` as far as it is read: columns, features, and a format."""

    def __init__(self, columns: dict[str, Any], features: dict[str, Any], kind: str | None = None) -> None:
        self.columns, self.features, self.format = columns, features, {"type": kind}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: Any) -> dict[str, Any]:
        return {name: column[i] for name, column in self.columns.items()}

    def select_columns(self, names: list[str]) -> Hugging:
        return Hugging({name: self.columns[name] for name in names}, self.features, self.format["type"])

    def with_format(self, kind: str | None) -> Hugging:
        return Hugging({n: np.array(c) if kind == "numpy" else c for n, c in self.columns.items()}, self.features, kind)


Hugging.__module__ = "datasets.arrow_dataset"
PictureFeature = type("Image", (Feature,), {})


def test_columns_are_found_by_their_kind_and_tokens_by_their_name() -> None:
    y, x = [i % 2 for i in range(24)], images()
    pictures = Hugging(
        {"photo": [Image.fromarray(one) for one in x], "size": y, "kind": y},
        {"photo": PictureFeature(), "size": Feature("int64"), "kind": ClassLabel("int64", ["ant", "bee"])},
    )
    made = selfless.stream([(pictures, pictures)])
    assert made.tasks[0].classes == ("ant", "bee")
    assert digest_stream(made) == digest_stream(selfless.stream([((Pictures(labels=(0, 1)),) * 2)]))
    tokens = Hugging({"input_ids": [[i, 3] for i in range(24)], "label": y}, {"input_ids": Feature("int32"), "label": Feature("int64")})
    plain = Hugging({"tokens": tokens.columns["input_ids"], "label": y}, {"tokens": Feature("int32"), "label": Feature("int64")}, "custom")
    assert inputs(selfless.stream([(tokens, tokens)]), 0).flatten(1)[5].tolist() == [5.0, 3.0]
    for one, options in ((tokens, {}), (plain, {"input": "tokens", "tokens": True})):
        assert inputs(selfless.stream([(one, one)], **options), 0).flatten(1)[5].tolist() == [5.0, 3.0]


@pytest.mark.parametrize(
    ("columns", "kinds", "options", "message"),
    [
        (
            {"x": [1, 2], "y": ["a", "b"]},
            {"y": Feature("string")},
            {},
            r"column 'y' holds text; number it with dataset.class_encode_column",
        ),
        ({"x": ["a", "b"], "y": [0, 1]}, {"x": Feature("string")}, {}, r"column 'x' holds text; tokenize it first, .* input='input_ids'"),
        ({"x": np.array([[1], [1, 2]], dtype=object), "y": [0, 1]}, {}, {}, r"inputs in 'x' differ in shape; pad or cut them"),
        ({"input_ids": [[1.5], [2.5]], "y": [0, 1]}, {}, {}, r"token ids must be integers up to 16777216, not torch.float64 up to 2.5"),
        ({"x": [1, 2], "y": [0, 1]}, {}, {"label": "z"}, r"has no 'z' for label=; it has x, y"),
        ({"a": [1, 2], "b": [1, 2], "y": [0, 1]}, {}, {}, r"which of a, b is the input\? Say so with input="),
        ({"x": [], "y": []}, {}, {}, "train is empty; give it at least one sample"),
    ],
)
def test_what_a_hugging_face_data_set_lacks(columns: Any, kinds: Any, options: Any, message: str) -> None:
    given = Hugging(columns, {name: kinds.get(name, Feature("int64")) for name in columns})
    with pytest.raises(ValueError, match=message):
        selfless.stream([(given, given)], **options)


def test_streamed_data_ragged_tokens_and_odd_inputs() -> None:
    streamed = type("Streamed", (), {"__module__": "datasets.iterable", "features": {}})()
    with pytest.raises(TypeError, match="is streamed, but training reads a task many times; load it without streaming=True"):
        selfless.stream([(streamed, streamed)])
    with pytest.raises(ValueError, match="sequences of tokens differ in length; pad them to one length"):
        selfless.stream([(([[1, 2], [3]], [0, 1]),) * 2], tokens=True)
    with pytest.raises(ValueError, match="an input is a object, not an image, an array or a list of numbers"):
        selfless.stream([([(object(), 0), (object(), 1)],) * 2])
    with pytest.raises(ValueError, match="train is empty; give it at least one sample"):
        selfless.stream([([], [])])
