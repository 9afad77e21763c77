"""HAT: each task learns which neurons it uses, and the weights between them are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.network.wiring import Wiring
from selfless.preserve.base import COUNT, HEAD, Group, Preserver, Splits, count_tasks, widened
from selfless.preserve.capabilities import Freezes, Gated, Holds, KnowsHeads, State, Tensors
from selfless.terms import check_positive


@dataclass(frozen=True)
class HAT(Preserver, Freezes, Gated, Holds, KnowsHeads):
    """Hard attention to the task (Serrà et al., ICML 2018). Every hidden neuron is multiplied by its gate a:

        a = σ(s·e),    s grows from 1/s_max to s_max in every epoch; the embedding e starts from N(0, 1) in every task
        loss + λ Σ a(1 − u)/Σ(1 − u),    u = 1 for neurons that earlier tasks use, else 0
        ∂e = s_max σ'(e) ∂a,    the annealed slope s σ'(s·e) times the paper's compensation s_max (cosh s·e + 1)/(s (cosh e + 1)),
                                which fades beyond |s·e| = `clamp`; |e| ≤ `limit`
        a weight is frozen if earlier tasks use the neurons at both of its ends; a bias is frozen if they use its neuron

    Plain SGD trains the embeddings, as in the paper, at the learning rate of the optimizer or at `rate`. At the end of a task its gates
    become hard, a = [e > 0], and the task is evaluated with them. The paper keeps σ(s_max·e), so old tasks can still change a little. With
    hard gates the paper's factor 1 − min(u_i, u_j) on gradients is 0 or 1, `project` resets frozen weights after each step, and old tasks
    do not change at all. Gradients are not clipped (the paper clips their norm at 10,000). HAT supports chains of linear layers and
    convolutions where a pointwise activation module follows each hidden layer, without residual connections. Evaluating an image requires
    knowing its task.
    """

    name: ClassVar[str] = "hat"
    is_weight: ClassVar[bool] = False
    groups: ClassVar[tuple[Group, ...]] = (
        Group("anchor", precision="parameter"),
        Group("frozen"),
        HEAD,
        COUNT,
        *(Group(name, like_parameter=False) for name in ("rows", "columns", "place", "used", "kept")),
        Group("embedding", like_parameter=False, changes_in_step=True),
    )
    splits: ClassVar[Splits] = "parameters"
    retired: ClassVar[tuple[str, ...]] = ("fresh",)
    why_no_auto: ClassVar[str] = "its strength weighs the share of gates that are open, which has no unit"
    strength: float = 0.75
    s_max: float = 400.0
    clamp: float = 50.0
    limit: float = 6.0
    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("s_max", "clamp", "limit", "rate"):
            check_positive(self, field)

    @property
    def has_own_rate(self) -> bool:
        return self.rate is not None

    def init(self, parameters: Tensors) -> State:
        return {**super().init(parameters), "count": count_tasks(parameters)}

    def wire(self, state: State, wiring: Wiring) -> State:
        """Store which gates are at the two ends of every weight. Gate number G means inputs and outputs, which are always used."""
        g = wiring.size
        device = next(iter(wiring.place.values())).device
        used = torch.zeros(g + 1, dtype=torch.bool, device=device)
        used[g] = True
        return {
            **state,
            "rows": dict(wiring.rows),
            "columns": dict(wiring.columns),
            "place": dict(wiring.place),
            "embedding": {"all": torch.zeros(g, device=device)},
            "used": {"all": used},
            "kept": {"all": torch.zeros(0, g, dtype=torch.bool, device=device)},
        }

    # ------------------------------------------------------------------------------------------------------------------- gates
    def gate_count(self, state: State) -> int:
        return state["embedding"]["all"].shape[-1]

    def start_gates(self, state: State, noise: Tensor) -> State:
        """Start a task with new embeddings from N(0, 1)."""
        return {**state, "embedding": {"all": noise.to(state["embedding"]["all"])}}

    def gate(self, state: State, share: Tensor | float) -> dict[str, Tensor]:
        """σ(s·e) of every layer."""
        s = self._slope(share)
        return self._by_layer(state, torch.sigmoid(s * state["embedding"]["all"]))

    def hard_gate(self, state: State, task: int | None) -> dict[str, Tensor]:
        """[e > 0] at the end of a task, or now for the current task (None)."""
        hard = state["embedding"]["all"] > 0 if task is None else state["kept"]["all"][task]
        return self._by_layer(state, hard.to(state["embedding"]["all"].dtype))

    def gate_penalty(self, state: State, gates: Tensors) -> Tensor:
        """Σ a(1 − u)/Σ(1 − u)."""
        used = self._by_layer(state, state["used"]["all"])
        total = torch.stack([(gates[n] * ~used[n]).sum() for n in gates]).sum()
        return total / torch.stack([(~used[n]).sum() for n in gates]).sum().clamp(min=1)

    def step_gates(self, state: State, gradients: Tensors, share: Tensor | float, lr: Tensor) -> State:
        """Take one step of SGD on e; `gradients` are ∂loss/∂a."""
        e, order = state["embedding"]["all"], torch.cat(list(state["place"].values()))
        gradient = torch.zeros_like(e).scatter(0, order, torch.cat([gradients[n] for n in state["place"]]).to(e.dtype))
        fade = torch.exp(-((self._slope(share) * e).abs() - self.clamp).clamp(min=0))
        slope = torch.sigmoid(e) * torch.sigmoid(-e)
        rate = lr if self.rate is None else torch.full_like(lr, self.rate) * (lr > 0)
        return {**state, "embedding": {"all": (e - rate * self.s_max * slope * fade * gradient).clamp(-self.limit, self.limit)}}

    def _slope(self, share: Tensor | float) -> Tensor | float:
        """s after a share (0 to 1) of the epoch's batches."""
        return 1 / self.s_max + (self.s_max - 1 / self.s_max) * share

    def _by_layer(self, state: State, values: Tensor) -> dict[str, Tensor]:
        return {name: values[place] for name, place in state["place"].items()}

    # ------------------------------------------------------------------------------------------------------------------- tasks
    def held(self, state: State) -> dict[str, tuple[Tensor, Tensor]]:
        """Frozen weights are held at θ*."""
        return {n: (frozen, state["anchor"][n]) for n, frozen in state["frozen"].items()}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Keep the hard gates, mark their neurons as used, and freeze the weights between used neurons."""
        hard = state["embedding"]["all"] > 0
        used = state["used"]["all"] | torch.cat([hard, torch.zeros_like(hard[:1])])
        ended = state["count"]["tasks"] + 1
        frozen, anchor = dict(state["frozen"]), dict(state["anchor"])  # a layer that did not train in this task keeps its own
        for name, p in parameters.items():
            if name not in state["rows"]:  # a head that was added during this task: wired from the next task on
                continue
            is_used = used[state["rows"][name]].view(-1, *[1] * (p.dim() - 1))
            if p.dim() > 1:
                is_used = is_used & used[state["columns"][name]].view(1, -1, *[1] * (p.dim() - 2))
            is_frozen = is_used.expand(p.shape)
            if name in state["head"]:
                is_frozen = is_frozen & (state["head"][name] < ended)  # the heads of later tasks are free
            frozen[name] = is_frozen.clone()
            before = state["frozen"].get(name)
            anchor[name] = widened(p) if before is None else torch.where(before, state["anchor"][name], widened(p))
        kept = torch.cat([state["kept"]["all"], hard.unsqueeze(0)])
        return {**state, "used": {"all": used}, "kept": {"all": kept}, "frozen": frozen, "anchor": anchor, "count": {"tasks": ended}}

    def importance(self, state: State) -> Tensors | None:
        """1 where a weight is frozen, 0 where it is free."""
        return {name: frozen.float() for name, frozen in state["frozen"].items()}
