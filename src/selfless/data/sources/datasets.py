"""One data set of any kind, read once into arrays: a torch data set, a pair of arrays, a list of items, or a Hugging Face data set.

Nothing of these libraries is imported. A Hugging Face data set is known by its `features`; a task of a Continuum scenario is a torch data
set whose items are (input, label, task).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from selfless.data.images import fit_image
from selfless.data.sources.arrays import as_images, as_labels, check_finite

LABELS = ("label", "labels", "target", "targets", "y")  # usual names of the column of labels
INPUTS = ("input_ids", "pixel_values", "image", "img", "x")  # usual names of the column of inputs
TOKENS = "input_ids"  # the column of token ids, as tokenizers name it
LARGEST = 2**24  # float32 represents every integer up to this one


@dataclass(frozen=True)
class Reading:
    """How to read a data set.

    input, label   the names of the columns or entries; None: found by their names and types
    tokens         True: integers are token ids, which are kept as they are; None: True for a column `input_ids`
    size           pictures and bytes are fitted to this side or (height, width) without distortion; None: they must have the same size
    channels       pictures and bytes become grey (1) or RGB (3); None: they stay as they are
    """

    input: str | None = None
    label: str | None = None
    tokens: bool | None = None
    size: int | tuple[int, int] | None = None
    channels: int | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Images (n, C, H, W), labels (n,), and the names of the classes 0, 1, … if the data set has them."""

    x: Tensor
    y: Tensor
    classes: tuple[str, ...] | None


def read_dataset(dataset: Any, what: str, how: Reading) -> Table:
    """Read a data set into arrays. `what` names it in messages: "task 2, test"."""
    if _is_pair(dataset):
        x, y = dataset
    elif isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        x, y = dataset.tensors
    elif _is_hugging_face(dataset):
        return _read_hugging_face(dataset, what, how)
    else:
        x, y = _read_items(dataset, what, how)
    inputs = _as_inputs(x, what, bool(how.tokens))
    return Table(inputs if how.tokens else _fitted(inputs, what, how), _check_labels(y, len(x), what), _class_names(dataset))


def _is_pair(dataset: Any) -> bool:
    """True for (inputs, labels): two arrays, tensors or lists of numbers."""
    return isinstance(dataset, tuple) and len(dataset) == 2 and not isinstance(dataset[0], tuple) and hasattr(dataset[0], "__len__")


def _as_inputs(x: Any, what: str, tokens: bool) -> Tensor:
    """Return inputs (n, C, H, W). Token ids become float32, which is exact; the network converts them back with `.long()`."""
    if not len(x):
        raise ValueError(f"{what} is empty; give it at least one sample of each class, or leave the task out")
    if tokens:
        try:
            ids = torch.as_tensor(x)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}: sequences of tokens differ in length; pad them to one length") from error
        if ids.is_floating_point() or int(ids.max()) > LARGEST:
            raise ValueError(f"{what}: token ids must be integers up to {LARGEST}, not {ids.dtype} up to {ids.max()}")
        x = ids.float()
    images = as_images(x, what)
    check_finite(images, what)
    return images


def _fitted(images: Tensor, what: str, how: Reading) -> Tensor:
    """Return images (n, C, H, W) with the size and channels that are asked for."""
    if how.size is None and how.channels is None:
        return images
    depth, *sides = images.shape[1:]
    size = sides if how.size is None else [int(how.size)] * 2 if isinstance(how.size, int | np.integer) else list(how.size)
    if (how.channels or depth, size) == (depth, sides):
        return images
    if images.dtype != torch.uint8 or depth not in (1, 3):
        raise ValueError(
            f"{what} has inputs {tuple(images.shape[1:])} of {str(images.dtype)[6:]}; size= and channels= fit pictures and bytes (uint8) "
            "with 1 or 3 channels. Convert the inputs in the data set"
        )
    return torch.stack([torch.from_numpy(fit_image(_picture(one), (size[0], size[1]), how.channels)) for one in images])


def _fitted_bytes(image: Tensor, what: str, how: Reading) -> Tensor:
    """Return the bytes of one item, (H, W), (C, H, W) or (H, W, C), as (C, H, W) with the size and channels that are asked for."""
    if image.dim() == 2:
        image = image[None]
    elif image.dim() == 3 and image.shape[0] not in (1, 3) and image.shape[2] in (1, 3):
        image = image.movedim(2, 0)
    return _fitted(image[None], what, how)[0] if image.dim() == 3 else image


def _picture(image: Tensor) -> Image.Image:
    """Return bytes (1 or 3, H, W) as a picture."""
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.movedim(0, -1).contiguous().numpy())


def _check_labels(y: Any, n: int, what: str) -> Tensor:
    labels = as_labels(y, f"{what}: labels")
    if len(labels) != n:
        raise ValueError(f"{what} has {n} inputs and {len(labels)} labels; there must be one label for each input")
    if bool((labels < 0).any()):
        raise ValueError(f"{what}: a label is {int(labels.min())}, which means that there is no label; use a split with labels")
    return labels


# ---- items -------------------------------------------------------------------------------------------------------------------
def _read_items(dataset: Any, what: str, how: Reading) -> tuple[Any, Any]:
    """Return the inputs and labels of a map-style data set, item by item."""
    if isinstance(dataset, DataLoader):
        raise TypeError(f"{what} is a DataLoader, which gives batches; pass its data set: loader.dataset")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{what} is a {type(dataset).__name__}, whose items cannot be read by number; pass a data set with a length and items, a pair "
            "(inputs, labels), or the list of the items: list(dataset)"
        )
    if not len(dataset):
        raise ValueError(f"{what} is empty; give it at least one sample of each class, or leave the task out")
    first = _split_item(dataset[0], dataset, what, how)
    x, fitted = _as_array(first[0], what, how), None
    if not _is_same(x, _as_array(_split_item(dataset[0], dataset, what, how)[0], what, how)):
        warnings.warn(
            f"{what} returns a different input each time, so it has a random transform, which would be drawn only once; remove it, "
            "and use Run(augment=…) instead",
            stacklevel=2,
        )
    labels: list[int] = []
    for i in range(len(dataset)):
        item, label = _split_item(dataset[i], dataset, what, how)
        one = _as_array(item, what, how)
        if fitted is None:
            fitted = torch.empty((len(dataset), *one.shape), dtype=one.dtype)
        if one.shape != fitted.shape[1:] or one.dtype != fitted.dtype:
            raise ValueError(
                f"{what}: input {i} is {_kind(one)}, input 0 {_kind(fitted[0])}; convert all inputs to one shape and type in the data "
                "set. size= and channels= do so for pictures and bytes (uint8) with 1 or 3 channels"
            )
        fitted[i] = one
        labels.append(_as_label(label, i, what))
    return fitted, labels


def _split_item(item: Any, dataset: Any, what: str, how: Reading) -> tuple[Any, Any]:
    """Return (input, label) of an item: a pair, a dictionary, or a Continuum triple (input, label, task)."""
    if isinstance(item, Mapping):
        names = list(item)
        return item[_find_column(names, how.input, INPUTS, "input", what)], item[_find_column(names, how.label, LABELS, "label", what)]
    triple = any(base.__module__.partition(".")[0] == "continuum" for base in type(dataset).__mro__)
    if not isinstance(item, tuple | list) or len(item) != 2 + triple:
        kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise ValueError(f"{what}: an item must be (input, label) or a dictionary, not a {kind}; wrap the data set in one that gives pairs")
    return item[0], item[1]


def _as_array(x: Any, what: str, how: Reading) -> Tensor:
    """Return one input as a tensor; an image as bytes (C, H, W)."""
    if isinstance(x, Image.Image):
        return torch.from_numpy(fit_image(x, how.size, how.channels))
    if isinstance(x, str):
        raise ValueError(f"{what}: an input is text; tokenize it to one length first, and give tokens=True")
    try:
        array = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: an input is a {type(x).__name__}, not an image, an array or a list of numbers") from error
    is_kept = how.tokens or array.dtype != torch.uint8 or (how.size is None and how.channels is None)
    return array if is_kept else _fitted_bytes(array, what, how)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _as_label(label: Any, i: int, what: str) -> int:
    """Return a label as an integer; a number such as 1.5 is an error."""
    try:
        return operator.index(label)  # also tensors and arrays with one integer
    except (TypeError, ValueError):
        hint = "; number the classes first" if isinstance(label, str) else ""
        raise ValueError(f"{what}: label {i} is {label!r}; labels must be integers, one for each input{hint}") from None


# ---- Hugging Face ------------------------------------------------------------------------------------------------------------
def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "features")


def _read_hugging_face(dataset: Any, what: str, how: Reading) -> Table:
    """Return the inputs and labels of a `datasets.Dataset`."""
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{what} is streamed, but training reads a task many times; load it without streaming=True, or take a part of it")
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    if dataset.format["type"] == "custom":  # a transform makes the items; it may rename their entries
        x, y = _read_items(dataset, what, how)
        label = _find_column(list(dataset[0]), how.label, LABELS, "label", what)
        tokens = how.tokens if how.tokens is not None else how.input in (None, TOKENS) and TOKENS in dataset[0]
        inputs = _as_inputs(x, what, tokens)
        return Table(inputs if tokens else _fitted(inputs, what, how), _check_labels(y, len(x), what), _label_names(dataset, label))
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = _find_column(list(kinds), how.label or (classes[0] if len(classes) == 1 else None), LABELS, "label", what)
    others = [name for name in kinds if name != label]
    images = [name for name in others if kinds[name] == "Image"]
    column = _find_column(others, how.input or (images[0] if len(images) == 1 else None), INPUTS, "input", what)
    names = _label_names(dataset, label)
    if getattr(dataset.features[label], "dtype", "") == "string":
        raise ValueError(f"{what}: the column {label!r} holds text; number it with dataset.class_encode_column({label!r})")
    if getattr(dataset.features[column], "dtype", "") == "string":
        raise ValueError(
            f"{what}: the column {column!r} holds text; tokenize it first, with padding to one length, and give input='{TOKENS}'"
        )
    if kinds[column] == "Image":
        pairs = _Renamed(dataset.select_columns([column, label]).with_format(None), column, label)
        x, y = _read_items(pairs, what, how)
        return Table(_as_inputs(x, what, tokens=False), _check_labels(y, len(x), what), names)
    arrays = dataset.select_columns([column, label]).with_format("numpy")[:]
    values = arrays[column]
    if isinstance(values, list) or values.dtype == object:
        raise ValueError(f"{what}: the inputs in {column!r} differ in shape; pad or cut them to one length (padding='max_length')")
    tokens = how.tokens if how.tokens is not None else column == TOKENS
    inputs = _as_inputs(values, what, tokens)
    return Table(inputs if tokens else _fitted(inputs, what, how), _check_labels(arrays[label], len(values), what), names)


def _label_names(dataset: Any, label: str) -> tuple[str, ...] | None:
    """Return the names of the classes if the column is a ClassLabel."""
    names = getattr(dataset.features.get(label), "names", None)
    return None if names is None else tuple(names)


@dataclass(frozen=True)
class _Renamed:
    """A Hugging Face data set whose items are pairs."""

    dataset: Any
    column: str
    label: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        item = self.dataset[i]
        return item[self.column], item[self.label]


def _find_column(names: Sequence[str], given: str | None, usual: Sequence[str], role: str, what: str) -> str:
    """Return the given name, else the only usual one, else the only name there is."""
    if given is not None:
        if given not in names:
            raise ValueError(f"{what} has no {given!r} for {role}=; it has {', '.join(names)}")
        return given
    found = [name for name in names if name in usual]
    if len(found) == 1 or len(names) == 1:
        return (found or list(names))[0]
    raise ValueError(f"{what}: which of {', '.join(names)} is the {role}? Say so with {role}=")


# ---- class names -------------------------------------------------------------------------------------------------------------
def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the names of the classes, as torchvision's data sets have them; of a part or a sum of data sets, those of the whole."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        found = {_class_names(one) for one in dataset.datasets}
        return found.pop() if len(found) == 1 else None
    names = getattr(dataset, "classes", None)
    return tuple(names) if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names) else None
