"""The autograd graph of a batch: where each parameter is used, and one backward pass that hands out gradients as they appear.

A parameter may enter an operation directly, or through views of it (a transpose, a slice). `Use` names the operation, the argument, and
the views in between. `stream_gradients` calls a function with the gradient at each requested place and then forgets that gradient, so a
backward pass needs no memory for all of them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any  # torch.autograd.graph.Node; its saved tensors are attributes that only the running graph has

Place = tuple[GradientEdge, Callable[[Tensor], None]]  # where a gradient is read, and what to do with it

# Views whose backward pass puts each entry of the gradient at one place. So they commute with Σ_m |·|ᵖ.
_VIEWS = {
    f"{name}Backward0"
    for name in "T Transpose Permute Unsqueeze Squeeze View UnsafeView ReshapeAlias Slice Select Alias Clone".split()
}  # fmt: skip


# What a layer does with its weight and bias besides the operation that its output comes from.
_LAYERS = _VIEWS | {f"{name}Backward0" for name in "Addmm Mm Bmm Add Expand Convolution MkldnnConvolution".split()}
_LAYERS |= {"SqueezeBackward1", "SqueezeBackward2"}

# Operations along an axis that may put samples elsewhere, in each batch in another way.
_ALONG = {f"{name}Backward0" for name in "IndexSelect IndexAdd IndexCopy IndexReduce Gather Scatter ScatterAdd ScatterReduce".split()}
_ALONG |= {f"{name}Backward0" for name in "Sort SplitWithSizes Slice".split()}
_ANYWHERE = {f"{name}Backward0" for name in "MaskedSelect MaskedScatter RepeatInterleave SegmentReduce Take Put".split()}

# Operations that join what lies along an axis: samples, if it is theirs.
_JOINS = {f"{name}Backward{n}" for name in "Sum Mean Prod Max Min Var Std LinalgVectorNorm".split() for n in range(3)}
_JOINS |= {f"{name}Backward0" for name in "Amax Amin Logsumexp Median Cumsum Cumprod Cummax Cummin Logcumsumexp Select Mode".split()}
_JOINS |= {f"{name}Backward0" for name in "Kthvalue Topk Norm Softmax LogSoftmax Flip Roll Aminmax VarMean StdMean".split()}

# Operations that make a weight from another one and a constant, as a mask.
_ELEMENTWISE = {f"{name}Backward0" for name in "Mul Add Sub Div Where MaskedFill Pow Clamp Lerp".split()}


@dataclass(frozen=True)
class Use:
    """One use of a parameter: argument `slot` of the operation `node`; `views` lead from that argument back to the parameter."""

    node: Node
    slot: int
    views: tuple[Node, ...]
    output: Node  # where the gradient is read: `node`, or an addition right after it that adds the axis of samples
    _saved: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def saved(self, name: str) -> Tensor:
        """Return a tensor that the operation saved. It is read once: with activation checkpointing a second time is an error."""
        if name not in self._saved:
            self._saved[name] = getattr(self.node, f"_saved_{name}")
        return self._saved[name]

    def forget(self) -> None:
        """Let go of the saved tensors."""
        self._saved.clear()

    @property
    def key(self) -> tuple[str, int]:
        """The kind of use, which is the same for every batch."""
        return str(self.node.name()), self.slot

    @property
    def edge(self) -> GradientEdge:
        return GradientEdge(self.output, 0)


@dataclass
class Graph:
    """The graph behind the values of one batch.

    counts      how many times each leaf enters an operation
    consumers   node → the operations that read its output, with the number of the argument
    following   node → the nodes whose outputs it reads; a node comes after all nodes that it reaches
    """

    counts: dict[Tensor, int] = field(default_factory=dict)
    consumers: dict[Node, list[tuple[Node, int]]] = field(default_factory=dict)
    following: dict[Node, list[Node]] = field(default_factory=dict)
    leaves: dict[Tensor, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Tensor) -> Graph:
        """Walk through the graph of `values`."""
        found = cls()
        stack: list[tuple[Node, list[Node] | None]] = [(values.grad_fn, None)]
        seen = set()
        while stack:
            node, following = stack.pop()
            if following is not None:
                found.following[node] = following
            elif node not in seen:
                seen.add(node)
                following = found._enter(node)
                stack.append((node, following))
                stack += [(after, None) for after in following]
        return found

    def _enter(self, node: Node) -> list[Node]:
        """Note what a node reads, and return those nodes."""
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise ValueError(
                "the model uses reentrant activation checkpointing, which hides its parameters from autograd; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        found = []
        for slot, (after, _) in enumerate(node.next_functions):
            if after is None:
                continue
            found.append(after)
            self.consumers.setdefault(after, []).append((node, slot))
            variable = getattr(after, "variable", None)
            if variable is not None:
                self.counts[variable] = self.counts.get(variable, 0) + 1
                self.leaves[variable] = after
        return found

    def deepest(self, nodes: set[Node]) -> set[Node]:
        """Return the `nodes` from which no other one can be reached."""
        below: dict[Node, bool] = {}  # node → one of `nodes` can be reached from it, itself not counted
        for node, following in self.following.items():
            below[node] = any(after in nodes or below[after] for after in following)
        return {node for node in nodes if not below.get(node, True)}

    def kind(self, count: int) -> frozenset[tuple[str, int]] | None:
        """Return what tells graphs apart whose samples lie in other axes: how often each operation is there.

        None if samples may lie elsewhere in each batch: where rows are chosen, sorted or split by the data.
        """
        with_data = self._with_data()
        if any(_moves_rows(node, count) or (count > 1 and _mixes_rows(node, count, with_data)) for node in self.following):
            return None
        return frozenset(Counter(str(node.name()) for node in self.following).items())

    def _with_data(self) -> dict[Node, bool]:
        """Return which nodes are activations: they come from an operation on data, which needs no gradient."""
        found: dict[Node, bool] = {}
        for node, following in self.following.items():  # a node comes after all that it reaches
            found[node] = _reads_data(node) or any(found[after] for after in following)
        return found

    def is_read_by(self, parameter: Tensor, output: Node) -> bool:
        """Return True if the parameter goes into the layer with this output as it is, and nowhere else."""
        node = self.leaves.get(parameter)
        while node is not None and node is not output:
            readers = self.consumers.get(node, [])
            node = readers[0][0] if len(readers) == 1 and (readers[0][0] is output or readers[0][0].name() in _LAYERS) else None
        return node is not None

    def uses(self, parameter: Tensor, count: int) -> list[Use]:
        """Return every use of a parameter in a batch of `count` samples."""
        leaf = self.leaves.get(parameter)
        return [] if leaf is None else self._uses(leaf, (), count)

    def _uses(self, source: Node, views: tuple[Node, ...], count: int) -> list[Use]:
        found: list[Use] = []
        for node, slot in self.consumers.get(source, ()):
            if node.name() in _VIEWS or _is_shift(node, slot, count):
                found += self._uses(node, (node, *views), count)
            else:
                found.append(Use(node, slot, views, self._batched(node, count)))
        return found

    def _batched(self, node: Node, count: int) -> Node:
        """Return the place of the gradient: an embedding of positions has no axis of samples; the addition after it broadcasts it.

        The backward pass of that addition hands its own gradient on, summed over the samples. Before the sum it has one row per sample.
        """
        following = self.consumers.get(node, ())
        if node.name() != "EmbeddingBackward0" or len(following) != 1 or count < 2:
            return node
        after, slot = following[0]
        inner, outer = shape_of(node), shape_of(after)
        is_sum = after.name() == "AddBackward0" and (slot == 0 or after._saved_alpha == 1)
        return after if is_sum and inner is not None and outer is not None and inner.numel() < outer.numel() else node


def count_uses(outputs: Iterable[Any]) -> Counter[Tensor]:
    """Return how often each leaf enters an operation that the outputs depend on."""
    found, stack, seen = Counter[Tensor](), [x.grad_fn for x in outputs if isinstance(x, Tensor)], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions]
        found.update(leaf for after in following if (leaf := getattr(after, "variable", None)) is not None)
        stack += following
    return found


def _moves_rows(node: Node, count: int) -> bool:
    """Return True if an operation may put rows elsewhere, in each batch in another way."""
    name = str(node.name())
    if name in _ANYWHERE:
        return True
    source = node.next_functions[0][0] if node.next_functions else None
    if hasattr(source, "variable"):  # rows of a table
        return False
    if name in ("IndexBackward0", "IndexPutBackward0"):
        rows = node._saved_indices[0]
        in_order = torch.arange(count, device=None if rows is None else rows.device)
        return rows is not None and (rows.dtype != torch.int64 or not torch.equal(rows.flatten(), in_order))  # else places of each sample
    if name == "SplitWithSizesBackward0" and len(set(node._saved_split_sizes)) == 1:
        return False
    return name in _ALONG and 0 in _axes(node, len(shape_of(node) or ()))


def _axes(node: Node, count: int) -> set[int]:
    """Return the axes of a tensor of `count` axes along which an operation works; autograd saves −1 as 2⁶⁴ − 1."""
    dims = next((found for key in ("_saved_dim", "_saved_dims") if (found := getattr(node, key, None)) is not None), None)
    listed = (dims,) if isinstance(dims, int) else tuple(dims or range(count))  # none are all
    return {(d - 2**64 if d >= 2**63 else d) % max(count, 1) for d in listed}


def _reads_data(node: Node) -> bool:
    """Return True for an operation of data and a weight; not for one of a weight and a constant that leaves its shape."""
    arguments = [after for after, _ in node.next_functions]
    if None not in arguments:
        return str(node.name()) == "EmbeddingBackward0"
    return str(node.name()) not in _ELEMENTWISE or all(shape_of(after) != shape_of(node) for after in arguments if after is not None)


def _mixes_rows(node: Node, count: int, with_data: Mapping[Node, bool]) -> bool:
    """Return True if an operation may add up rows of several samples, by factors that differ from batch to batch.

    A h and (hᵀ A)ᵀ with a matrix A of data or of activations, as in graph networks, and Σ_j A_ij h_j by a multiplication: where the axis
    that is summed may hold the samples. An ordinary product sums over the inputs of a layer, or within each sample (`bmm`).
    """
    name = str(node.name())
    if name.startswith(("SparseAddmm", "SparseMm", "SparseSparse", "Mv", "Addmv")):
        return True
    if name in _JOINS:
        source = node.next_functions[0][0]
        inner = None if source is None or not with_data[source] else shape_of(source)
        return inner is not None and len(inner) > 0 and inner[0] % count == 0 and 0 in _axes(node, len(inner))
    if name == "MulBackward0":
        return any(_is_spread(after, node, count) for after, _ in node.next_functions if after is not None and with_data[after])
    if name not in ("MmBackward0", "BmmBackward0", "AddmmBackward0", "BaddbmmBackward0"):
        return False
    (left, _), (right, _) = node.next_functions[-2:]
    whole = shape_of(node) or (0,)
    if len(whole) == 3 and whole[0] % count == 0:
        return False
    if right is not None and with_data[right]:
        return (shape_of(right) or (0, 1))[-2] % count == 0
    turned = left is not None and with_data[left] and str(left.name()) in ("TBackward0", "TransposeBackward0", "PermuteBackward0")
    return turned and right is None and (shape_of(left) or (1,))[-1] % count == 0


def _is_spread(source: Node, node: Node, count: int) -> bool:
    """Return True if activations are the same for each row of a product, and have as many rows of their own as there are samples."""
    inner, outer = shape_of(source), shape_of(node)
    if not inner or not outer:
        return False
    padded = [1] * (len(outer) - len(inner)) + list(inner)
    return padded[0] == 1 and outer[0] % count == 0 and any(n % count == 0 for n in padded[1:-1])


def _is_shift(node: Node, slot: int, count: int) -> bool:
    """Return True for θ + constant of the shape of θ, such as the scale 1 + θ of Gemma: its gradient is that of θ."""
    if node.name() != "AddBackward0" or any(f is not None for i, (f, _) in enumerate(node.next_functions) if i != slot):
        return False
    source = node.next_functions[slot][0]
    shape = source.variable.shape if hasattr(source, "variable") else shape_of(source)
    if not shape or shape[0] == count:
        return False
    return shape == shape_of(node) and (slot == 0 or node._saved_alpha == 1)


def shape_of(node: Node) -> torch.Size | None:
    """Return the shape of a node's output; None if this version of torch does not tell."""
    metadata = getattr(node, "_input_metadata", None)
    return torch.Size(metadata[0].shape) if metadata else None


def stream_gradients(values: Tensor, graph: Graph, places: Sequence[Place], retain: bool) -> None:
    """Run one backward pass from Σ_m L_m. Call each function with the gradient at its edge, as soon as that is complete.

    The pass goes as far as the deepest edges, from which no other edge can be reached. Their gradients are returned by autograd; all
    others are read by hooks while the pass runs. No gradient of a parameter is computed.
    """
    deepest = graph.deepest({edge.node for edge, _ in places})
    last = [place for place in places if place[0].node in deepest]
    handles = []
    for edge, receive in places:
        if edge.node not in deepest and edge.node is not None:
            handles.append(edge.node.register_prehook(_reader(edge.output_nr, receive)))
    try:
        grads = torch.autograd.grad(values.sum(), [edge for edge, _ in last], allow_unused=True, retain_graph=retain) if last else ()
    finally:
        for handle in handles:
            handle.remove()
    for (_, receive), gradient in zip(last, grads, strict=True):
        if gradient is not None:
            receive(gradient)


def _reader(position: int, receive: Callable[[Tensor], None]) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return a hook of a node that passes one of its incoming gradients on."""

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[position]
        if gradient is not None:
            receive(gradient)

    return hook


def apply_views(views: Sequence[Node], gradient: Tensor) -> Tensor:
    """Return the gradient of the parameter, from that of a view of it."""
    for node in views:
        gradient = gradient if node.name() == "AddBackward0" else node(gradient)
    return gradient
