"""A user's own data: arrays, .npz, torch data sets, folders of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from selfless.data import DataError, MissingData, from_arrays, from_datasets, from_folders, from_npz, stream
from selfless.data.sources.arrays import as_images
from selfless.data.sources.folders import natural_key


def arrays(n: int = 40, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (n, 5, 6)).astype(np.uint8)
    return x, np.arange(n) % classes


def test_shapes_and_types() -> None:
    assert as_images(np.zeros((3, 7))).shape == (3, 1, 1, 7)
    assert as_images(np.zeros((3, 7))).dtype == torch.float32
    assert as_images(np.zeros((3, 5, 6), np.int64)).dtype == torch.uint8
    assert as_images(np.zeros((3, 5, 6, 3), np.uint8)).shape == (3, 3, 5, 6)
    assert as_images(torch.zeros(3, 3, 5, 6)).shape == (3, 3, 5, 6)
    with pytest.raises(ValueError, match=r"outside 0 … 255"):
        as_images(np.full((2, 2), 300))
    with pytest.raises(ValueError, match="must be"):
        as_images(np.zeros((1, 2, 3, 4, 5)))


def test_arrays_without_tasks_make_any_kind_of_stream() -> None:
    x, y = arrays()
    made = from_arrays(x, y + 10, x[:8], y[:8] + 10, kind="split", classes_per_task=2, class_order="natural")
    assert [t.classes for t in made.tasks] == [("10", "11"), ("12", "13")]
    assert len(from_arrays(x, y, x, y, kind="permuted", tasks=3).tasks) == 3
    assert len(from_arrays(x, y, x, y, tasks=2).tasks) == 2
    with pytest.raises(ValueError, match="set classes_per_task="):
        from_arrays(x, y, x, y)
    with pytest.raises(ValueError, match="no kind of stream"):
        from_arrays(x, y, x, y, kind="splitt")


def test_arrays_with_tasks() -> None:
    x, y = arrays()
    made = from_arrays(x, y, x[:8], y[:8], task=y // 2)
    assert [t.heads for t in made.tasks] == [(range(2),), (range(2, 4),)]
    assert [len(t.test) for t in made.tasks] == [4, 4], "test images follow their classes"
    assert made.tasks[1].train.targets.unique().tolist() == [2, 3]

    halves = np.arange(40) // 20  # every task has every class
    with pytest.raises(ValueError, match="task_test="):
        from_arrays(x, y, x[:8], y[:8], task=halves)
    own = from_arrays(x, y, x, y, task=halves, task_test=halves, held_out=0.2)
    assert own.outputs == 8
    assert len(own.tasks[0].held_out) == 4
    shared = from_arrays(x, y, x, y, task=halves, task_test=halves, head="shared")
    assert shared.outputs == 4
    assert [t.heads for t in shared.tasks] == [(range(4),)] * 2


def test_a_memory_mapped_array_is_not_copied(tmp_path: Path) -> None:
    x, y = arrays()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    made = from_arrays(mapped, y, x[:8], y[:8], tasks=2)
    assert made.tasks[0].train.images.data_ptr() == mapped.ctypes.data
    assert torch.equal(made.tasks[0].train.images[:, 0], torch.from_numpy(x))


def test_a_test_share_is_seeded_and_apart() -> None:
    x, y = arrays()
    one, two, other = (from_arrays(x, y, task=y // 2, test_share=0.2, seed=s) for s in (0, 0, 1))
    assert sum(len(t.test) for t in one.tasks) == 8
    assert sum(len(t.train) for t in one.tasks) == 32
    a, b, c = (s.tasks[0].test.resident().x for s in (one, two, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_npz(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], task=y // 2)
    made = stream(f"arrays:{tmp_path / 'mine.npz'}", held_out=0.1)
    assert (made.name, len(made.tasks)) == ("mine", 2)
    assert stream(f"joint-arrays:{tmp_path / 'mine.npz'}").tasks[0].heads == (range(2), range(2, 4))
    with pytest.raises(ValueError, match="no option 'heads'; did you mean 'head'"):
        stream(f"arrays:{tmp_path / 'mine.npz'}", heads="own")
    np.savez(tmp_path / "bare.npz", x_train=x, labels=y)
    with pytest.raises(DataError, match="needed are x_train and y_train"):
        stream(f"arrays:{tmp_path / 'bare.npz'}")
    np.savez(tmp_path / "pickled.npz", x_train=np.array([{}], dtype=object), y_train=y)
    with pytest.raises(DataError, match=r"not a plain \.npz"):
        stream(f"arrays:{tmp_path / 'pickled.npz'}")
    (tmp_path / "no.npz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"not a plain \.npz"):
        stream(f"arrays:{tmp_path / 'no.npz'}")
    with pytest.raises(MissingData, match="not there"):
        stream(f"arrays:{tmp_path / 'absent.npz'}")


class Pictures(Dataset[tuple[Image.Image, int]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.full((4, 5, 3), 10 * i, np.uint8)), i % 3


class Flow(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter([(torch.full((3, 4, 5), i, dtype=torch.uint8), i % 2) for i in range(4)])


def test_torch_datasets() -> None:
    tensors = TensorDataset(torch.zeros(5, 3, 4, 5, dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 4]))
    made = from_datasets([(Pictures(), Pictures()), (list(Flow()), list(Flow())), (tensors, tensors)], names=["a", "b", "c"])
    assert [t.name for t in made.tasks] == ["a", "b", "c"]
    assert [len(t.train) for t in made.tasks] == [6, 4, 5]
    assert [t.heads for t in made.tasks] == [(range(3),), (range(3, 5),), (range(5, 10),)]
    assert made.input_shape == (3, 4, 5)
    assert made.tasks[0].train.resident().x[2].unique().tolist() == [20]
    odd = TensorDataset(torch.zeros(5, 3, 9, 9, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="agree in shape"):
        from_datasets([(tensors, tensors), (odd, odd)])


def picture(path: Path, value: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 0, 255 - value)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    top = tmp_path / "pets"
    for t, task in enumerate(("task2", "task10")):
        for c, kind in enumerate(("cat", "dog")):
            for i in range(4):
                picture(top / task / "train" / kind / f"{i}.png", 60 * t + 20 * c + i)
            picture(top / task / "test" / kind / "x.jpg", 60 * t + 20 * c)
    return top


def test_folders_with_train_and_test(folders: Path) -> None:
    made = stream(f"folders:{folders}", held_out=0.25)
    assert [t.name for t in made.tasks] == ["task2", "task10"], "natural order"
    assert [t.heads for t in made.tasks] == [(range(2),), (range(2, 4),)]
    assert [t.classes for t in made.tasks] == [("cat", "dog")] * 2
    assert [(len(t.train), len(t.held_out), len(t.test)) for t in made.tasks] == [(6, 2, 2)] * 2
    assert made.input_shape == (3, 8, 8)
    assert made.notes == ()
    whole = stream(f"folders:{folders}").tasks[1].train.resident()
    assert whole.x[:, 0, 0, 0].tolist() == [60, 61, 62, 63, 80, 81, 82, 83]
    assert stream(f"folders:{folders}", task_order=["task10"]).tasks[0].name == "task10"
    assert stream(f"folders:{folders}", head="shared").outputs == 2


def test_folders_without_test_odd_sizes_and_grey(tmp_path: Path) -> None:
    top = tmp_path / "own"
    for kind in ("a", "b"):
        for i in range(10):
            picture(top / "only" / kind / f"{i}.png", 10 * i, (8 + i % 2, 8), "L")
    made = from_folders(top, size=6)
    assert made.input_shape == (1, 6, 6), "all grey: one channel"
    assert (len(made.tasks[0].train), len(made.tasks[0].test)) == (16, 4)
    assert made.notes == ("own: images of 2 sizes were fitted to 6×6",)
    assert from_folders(top).input_shape == (1, 64, 64)
    assert from_folders(top, channels=3).input_shape == (3, 64, 64)
    picture(top / "only" / "b" / "rgb.png", 9)
    assert from_folders(top).input_shape == (3, 64, 64), "the new image is noticed"


def test_folders_malformed(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(MissingData, match="not a folder"):
        stream(f"folders:{tmp_path / 'none'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no folder of a task; put images into .*/empty/<task>/<class>/\*\.png"):
        stream(f"folders:{tmp_path / 'empty'}")
    (tmp_path / "empty" / "task").mkdir()
    with pytest.raises(DataError, match="0 training and 0 test images"):
        stream(f"folders:{tmp_path / 'empty'}")
    (folders / "task2" / "train" / "cat" / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png is not a readable image"):
        stream(f"folders:{folders}")
    with pytest.raises(ValueError, match="no option 'sise'; did you mean 'size'"):
        stream(f"folders:{folders}", sise=3)


def test_a_class_only_in_the_test_set_is_an_error(folders: Path) -> None:
    picture(folders / "task2" / "test" / "fox" / "1.png", 3)
    with pytest.raises(ValueError, match=r"task2 is tested on the class 'fox', of which it has no training images; add some"):
        stream(f"folders:{folders}")


def test_natural_order() -> None:
    assert sorted(["b10", "b9", "a", "10", "9"], key=natural_key) == ["9", "10", "a", "b9", "b10"]


X = np.random.default_rng(0).random((24, 5), dtype=np.float32)
Y = np.arange(24) % 4


def test_an_input_that_is_not_finite_is_named_by_file_task_and_sample(tmp_path: Path) -> None:
    wrong = X.copy()
    wrong[7, 2] = np.nan
    wrong[9, 0] = np.inf
    with pytest.raises(ValueError, match=r"^x_train: sample 7 \(from 0\), of task 1, contains NaN; leave it out, or replace the values"):
        from_arrays(wrong, Y, task=Y // 2)
    with pytest.raises(ValueError, match=r"^x_test: sample 9 \(from 0\) contains infinity"):
        from_arrays(X, Y, np.nan_to_num(wrong, posinf=np.inf), Y, classes_per_task=2)
    with pytest.raises(ValueError, match=r"^night, test: sample 7 \(from 0\) contains NaN"):
        stream([((X, Y), (X, Y)), {"train": (X, Y), "test": (wrong, Y), "name": "night"}])
    np.savez(tmp_path / "mine.npz", x_train=wrong, y_train=Y, task=Y // 2)
    with pytest.raises(ValueError, match=r"mine\.npz: x_train: sample 7 \(from 0\), of task 1, contains NaN"):
        from_npz(tmp_path / "mine.npz")
    items = [(torch.from_numpy(row), 0) for row in wrong]
    with pytest.raises(ValueError, match=r"^task 1, train: sample 7"):
        stream([(items, items)])


def test_options_that_a_task_for_each_image_excludes() -> None:
    for options, name in (({"classes_per_task": 2}, "classes_per_task"), ({"kind": "permuted"}, "kind")):
        with pytest.raises(
            ValueError, match=f"has a task number for each image, which decides the tasks, so {name}= cannot; leave out {name}="
        ):
            from_arrays(X, Y, task=Y // 2, **options)
    with pytest.raises(ValueError, match="no kind of stream is called 'spilt'; did you mean 'split'"):
        from_arrays(X, Y, kind="spilt")


def test_names_of_tasks_are_one_for_each_and_differ(folders: Path) -> None:
    for names in (["a"], ["a", "a"]):
        with pytest.raises(ValueError, match="give each task a name of its own"):
            from_arrays(X, Y, task=Y // 2, names=names)
        with pytest.raises(ValueError, match="give each task a name of its own"):
            stream([((X, Y), (X, Y))] * 2, names=names)
    assert stream(f"folders:{folders}", names=["first", "second"]).tasks[0].name == "first"


def test_folders_without_tasks_and_streams_without_paths(folders: Path) -> None:
    with pytest.raises(DataError, match=r"task_order names 'tusk', which is no folder of .*; list its folders once each: task"):
        stream(f"folders:{folders}", task_order=["tusk"])
    with pytest.raises(ValueError, match="stream 'folders:' needs a path after the colon: folders:my/tasks"):
        stream("folders:")
    with pytest.raises(
        ValueError, match="class_order: 9 is not a class of arrays; list its classes once each, by name or number from 0: 0, 1"
    ):
        from_arrays(X, Y, classes_per_task=2, class_order=[9])
