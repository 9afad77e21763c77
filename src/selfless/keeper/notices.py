"""What a keeper says aloud, once: uses that give a worse network without any error."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfless.keeper.anchor import distances
from selfless.keeper.buffers import lasting_buffers
from selfless.keeper.changes import Changes, is_far
from selfless.keeper.log import floats
from selfless.keeper.part import Part
from selfless.network.calling import Forward, variables_of
from selfless.preserve.capabilities import Anchored, Distils, Gated, Phased, ProjectsSteps, Proximal, Replays
from selfless.sparsify import Sparsifier

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper

SILENT_STEPS, SILENT = 20, 0.2  # warn if a layer has fewer active neurons per sample than this, on average over so many steps
MOVED = 1e-4  # weights that differ from θ* by this share were trained
FAR = 0.9  # warn if loaded weights are so far from θ*, as a share of ‖θ*‖; two networks from different seeds are at about 1.4


class Notices:
    """Warnings of one keeper; each is given once."""

    def __init__(self, terms: Sequence[Sparsifier]) -> None:
        self._terms = terms
        self._given: set[str] = set()
        self._looked_in = -1  # the task in which running statistics were checked last
        self._looked_by: Callable[[], object] = lambda: None  # the optimizer whose step checked them
        self._buffers: dict[str, Tensor] = {}  # the sums of buffers after the first step of a task, until the second one
        self._active: dict[str, deque[float]] = {}  # active neurons per sample in the last steps, by layer
        self._unsigned: set[str] = set()  # layers whose sign was looked at
        self._reads: dict[int, dict[str, object]] = {}  # task → the variables that its forward= read when it ended

    def once(self, key: str, message: str, stacklevel: int = 4) -> None:
        """Warn, if this key has not been warned of."""
        if key not in self._given:
            self._given.add(key)
            warnings.warn(message, stacklevel=stacklevel)

    def check_sign(self, found: Mapping[str, Tensor]) -> None:
        """Warn of negative activations under a sparsifier that assumes h ≥ 0; each layer is looked at in one step."""
        new = [name for name in found if name not in self._unsigned]
        terms = [term for term in self._terms if term.is_on and getattr(term, "absolute", True) is False]
        self._unsigned |= set(new)
        signed = [name for name in new if found[name].numel() and bool(found[name].detach().amin() < 0)] if terms else []
        if signed:
            name = type(terms[0]).__name__
            strength = '"auto"' if terms[0].is_auto else f"{terms[0].fixed_strength:g}"
            self.once(
                "sign",
                f"layer {signed[0]!r} has negative activations, and {name} assumes h ≥ 0: pairs of opposite sign lower the penalty. "
                f"For GELU, SiLU or tanh write {name}({strength}, absolute=True)",
            )

    def check_activity(self, active: Mapping[str, float]) -> None:
        """Warn of a layer that has been almost silent for many steps; `active` is its number of active neurons per sample."""
        for name, neurons in active.items():
            last = self._active.setdefault(name, deque(maxlen=SILENT_STEPS))
            last.append(neurons)
            if len(last) == SILENT_STEPS and (mean := sum(last) / SILENT_STEPS) < SILENT:
                self.once(
                    f"silent {name}",
                    f"layer {name!r} is almost silent: in the last {SILENT_STEPS} steps {mean:.2g} of its neurons were active per sample, "
                    "so it hardly learns: lower λ of the sparsifier, or lower the learning rate",
                    stacklevel=6,
                )

    def check_statistics(self, model: nn.Module, tasks: int, optimizer: torch.optim.Optimizer) -> None:
        """Warn of running statistics and other buffers that follow a later task.

        Only the first step of a task looks, and the second one of the same optimizer: the walk over modules costs time, and other
        optimizers may step without a forward pass between.
        """
        if tasks == self._looked_in:
            if self._buffers and self._looked_by() is optimizer:
                self._check_buffers(model, tasks)
            return
        self._looked_in, self._looked_by = tasks, weakref.ref(optimizer)
        norms = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        moving = None if "statistics" in self._given else next((n for n, m in norms if m.training and m.running_mean is not None), None)
        if moving is not None:
            self.once(
                "statistics",
                f"the running statistics of {moving!r} follow task {tasks + 1}, so old tasks are evaluated with others than they were "
                "trained with: freeze them after model.train() (norm.eval()), keep a copy of the buffers for each task, or use group "
                "or layer normalisation",
            )
        self._buffers = {} if "buffer" in self._given else dict(lasting_buffers(model))

    def _check_buffers(self, model: nn.Module, tasks: int) -> None:
        """Warn of a buffer that the second step of a task has changed."""
        before, self._buffers = self._buffers, {}
        now = dict(lasting_buffers(model)).items()
        moving = [n for n, t in now if n in before and not torch.allclose(t, before[n].to(t), rtol=0.0, atol=0.0, equal_nan=True)]
        if moving:
            self.once(
                "buffer",
                f"the buffer {moving[0]!r} changes in the training steps of task {tasks + 1}: if outputs depend on it, old tasks are "
                "evaluated with other values than they were trained with; keep a copy of the buffers for each task",
            )

    def check_mode(self, model: nn.Module) -> None:
        """Warn of a penalty in eval mode."""
        reads = any(term.is_on and term.reads == "activations" for term in self._terms)
        if torch.is_grad_enabled() and not model.training and reads:
            warnings.warn("in eval mode keeper.penalty() does not include the sparsifier; call model.train() before training", stacklevel=3)

    def check_calls(
        self,
        parts: Iterable[Part],
        without_penalty: Sequence[Part] | None,
        tasks: int,
        forward: Forward | None,
        epoch: tuple[int, int] | None,
    ) -> None:
        """Warn if a task was trained without a call that a term needs; `without_penalty` is None if penalty() was called.

        `epoch` is the last epoch that was begun, and of how many.
        """
        has_epoch = epoch is not None
        if without_penalty is not None:
            needed = [type(term).__name__ for term in self._terms if term.is_on] + [type(p.term).__name__ for p in without_penalty]
            if needed:
                who = f"{' and '.join(needed)} {'needs' if len(needed) == 1 else 'need'}"
                warnings.warn(f"this task was trained without keeper.penalty(), which {who} in the loss", stacklevel=4)
        for part in parts:
            term = part.term
            if not isinstance(term, Phased):
                continue
            has_new_head = part.has_own_heads or forward is not None  # a head that all tasks share is not new and needs no forward=
            name = type(term).__name__
            if term.warms_up(tasks) and has_new_head and not (part.has_own_heads and has_epoch):
                remedy = "call keeper.begin_epoch(epoch, epochs) before every epoch"
                remedy = remedy if part.has_own_heads else "name the heads of the tasks: attach(…, heads=[…])"
                plain = term.without_warmup()
                remedy += "" if plain is None else f", or attach {str(plain)!r}, which has no warm-up"
                warnings.warn(f"{name} trains the head of a new task alone at first, but this task had no warm-up: {remedy}", stacklevel=5)
            elif not has_epoch and not term.warms_up(1) and any(term.starts_phase(epoch, 10) for epoch in range(10)):
                self.once(
                    "epochs",
                    f"{name} has phases within a task, but this task had no keeper.begin_epoch(epoch, epochs): its weights were chosen at "
                    "the end and not retrained, which costs accuracy. Call it before every epoch",
                    stacklevel=5,
                )
            elif epoch is not None and term.is_on and (not term.warms_up(1) or (term.warms_up(tasks) and has_new_head)):
                left = [later for later in range(epoch[0] + 1, epoch[1]) if term.starts_phase(later, epoch[1])]
                self._warn_of_phases(name, epoch, left)

    @staticmethod
    def _warn_of_phases(name: str, epoch: tuple[int, int], left: Sequence[int]) -> None:
        """Warn if a task ended before the epochs `left`, in which phases begin."""
        if left:
            warnings.warn(
                f"this task ended after epoch {epoch[0] + 1} of {epoch[1]}, before {name} began its next phase, which costs accuracy: "
                "call keeper.begin_epoch with the number of epochs that you train, or go on to the end",
                stacklevel=6,
            )

    @staticmethod
    def warn_of_lost_penalties(times: int) -> None:
        """Warn of a task in which no backward pass reached a value of keeper.penalty()."""
        warnings.warn(
            f"keeper.penalty() was called {times} times in this task, but no backward pass reached its value, so it changed nothing. Add "
            "it to the loss: loss = task_loss + keeper.penalty((x, y))",
            stacklevel=4,
        )

    def warn_of_forgotten(self, names: Sequence[str]) -> None:
        """Warn of parameters that have a gradient, but no optimizer that steps."""
        some = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        self.once(
            f"forgotten {names[0]}",
            f"{some} got a gradient in this task, but no optimizer that took a step has them, so they did not train. If they were added "
            "later, build a new optimizer over model.parameters()",
            stacklevel=5,
        )

    def warn_of_epochs(self) -> None:
        """Warn of an epoch 0 that begins after the last epoch, although the task has not ended."""
        self.once(
            "epochs again",
            "epoch 0 begins again, but no task has ended since. If a new task begins here, call keeper.consolidate() first, else the old "
            "one is not protected. If the same task goes on, continue its numbers: keeper.begin_epoch(epochs so far, all epochs)",
            stacklevel=5,
        )

    def silence_epochs(self) -> None:
        """Never give that warning: a trainer may take several fits for a task."""
        self._given.add("epochs again")

    def check_no_step(
        self,
        parts: Sequence[Part],
        parameters: Mapping[str, Tensor],
        tasks: int,
        implicit: bool,
        trained: bool,
        same_batches: bool,
        untouched: bool,
    ) -> None:
        """Warn of a task that ends although no optimizer took a step in it, where that protects nothing or too much.

        `trained` is True if the penalty was computed in this task, `untouched` if a loop computed it and no parameter was written.
        """
        if untouched:
            warnings.warn(
                "keeper.penalty() was called in this task, but no weight of the attached model has changed, so it learned nothing. If you "
                "train a copy of it (copy.deepcopy), attach() to the copy and call load_state_dict(old_keeper.state_dict())",
                stacklevel=5,
            )
            return
        learned = next((type(part.term).__name__ for part in parts if part.path is not None or part.gates is not None), None)
        if learned is not None and not trained:
            warnings.warn(
                f"{learned} learns in the steps of an optimizer what a task needs, and this task had none, so it is not protected. A model "
                "that was trained before is protected by methods that measure importance on data",
                stacklevel=5,
            )
        moved = any(self._drift(part, parameters) > MOVED for part in parts)
        if same_batches and not trained and not moved:
            warnings.warn(
                "keeper.consolidate() was called twice with the same data and no step between: this counts as another task, and its "
                "importance is counted twice",
                stacklevel=5,
            )
        elif implicit and tasks and moved and any(isinstance(part.term, Anchored) and part.is_on for part in parts):
            warnings.warn(
                "the weights have changed since the last task, but no step of a torch.optim optimizer was seen, so the implicit anchor of "
                "anchor_with() held nothing. If you update weights yourself, leave anchor_with() out: keeper.penalty() then has the anchor",
                stacklevel=5,
            )

    def check_by_hand(self, parts: Sequence[Part], tasks: int) -> None:
        """Warn of a task whose weights were changed by no optimizer, if a method protects by changing what an optimizer does."""
        kinds = (Gated, Proximal, ProjectsSteps) if tasks else (Gated,)
        acting = [type(part.term).__name__ for part in parts if part.is_on and isinstance(part.term, kinds)]
        if acting:
            self.once(
                "by hand",
                f"the weights have changed in this task, but no step of a torch.optim optimizer was seen, so {acting[0]} protected "
                "nothing: it acts before or after such steps. Put your update into a subclass of torch.optim.Optimizer, or take a method "
                "that holds weights, without anchor_with()",
                stacklevel=5,
            )

    @staticmethod
    def _drift(part: Part, parameters: Mapping[str, Tensor]) -> float:
        """Return ‖θ − θ*‖ / ‖θ*‖; 0 without θ*."""
        found = floats(distances(parameters, part.star()[0], None))
        drift, size = (math.sqrt(found.get(key, 0.0)) for key in ("drift", "size"))
        return drift / size if size else 0.0

    def check_read(self, keeper: Keeper, has_step: bool) -> None:
        """Warn of inject=True if a sparsifier has read no activations so far, or not those of a layer that was named."""
        collector = keeper.collector
        if keeper.injector is None or not has_step or not any(term.is_on and term.reads == "activations" for term in self._terms):
            return
        unread = [name for name in collector.taps if name not in collector.reached]
        if collector.taps and (len(unread) == len(collector.taps) or (unread and not collector.auto)):
            self.once(
                "unread",
                f"the activations of {', '.join(unread[:3])} were never read, so the sparsifier did not act there. They count "
                "in training mode and with gradients on, and the forward pass must use the layer. In a compiled model only activation "
                "modules can be read, and only if it was not run before attach()",
                stacklevel=6,
            )

    def check_changes(self, changes: Changes, keeper: Keeper, is_fresh: bool) -> None:
        """Warn, at the first penalty of a task, of parameters that old tasks need and nothing protects.

        is_fresh   the parameters should be those with which the last task ended
        """
        if not keeper.tasks or not any(part.is_on and not isinstance(part.term, Replays) for part in keeper.parts):
            return
        self._check_renamed(keeper)
        for task, reads in self._reads.items():
            self._check_late(keeper, task, reads)
        thawed = changes.thawed(keeper.preserved(), keeper.heads)
        if thawed:
            names = ", ".join(thawed[:3]) + (" …" if len(thawed) > 3 else "")
            self.once(
                f"thawed {thawed}",
                f"{names} did not train when task {changes.frozen[thawed[0]]} ended, so what that task needs of them was not measured and "
                "is not protected, and now they train. Keep them frozen, or let them train from the first task on",
                stacklevel=5,
            )
        if replaced := changes.replaced(keeper.model, keeper.parts, keeper.heads[keeper.tasks :]):
            self.once(
                f"replaced {replaced}",
                f"{replaced!r} is another parameter than when task {keeper.tasks} ended, with the same name: it is held at the old values. "
                "Give a new layer a name of its own; if each task has a head, add it to an nn.ModuleList and name all of them: heads=[…]",
                stacklevel=5,
            )

        if not is_fresh or torch.compiler.is_compiling():
            return
        if rewritten := changes.rewritten(keeper.model, keeper.parts, keeper.heads[keeper.tasks :]):
            self.once(
                "rewritten",
                f"{rewritten!r} has changed since task {keeper.tasks} ended, before the first step of the next one, but old tasks are held "
                "at the values that it had in keeper.consolidate(). If you restore the best weights of a task, do so before consolidate(); "
                "if you reset a head for each task, leave it out with parameters=",
                stacklevel=5,
            )

    def _check_renamed(self, keeper: Keeper) -> None:
        """Warn of parameters that have other names than in the tasks before: nothing protects them."""
        there, stars = dict(keeper.model.named_parameters()), [part.star()[0] for part in keeper.parts if part.is_on]
        gone = {name: t for star in stars for name, t in star.items() if name not in there}
        held = {name for star in stars for name in star}
        new = {name: p for name, p in keeper.preserved().items() if name not in held} if gone else {}
        for old, star in gone.items():
            same = [name for name, p in new.items() if p.dim() > 1 and p.shape == star.shape and not is_far(p, star)]
            if same:
                self.once(
                    f"renamed {old}",
                    f"the model has no {old!r} any more, which earlier tasks need, but {same[0]!r} with nearly the same values, which "
                    "nothing protects. Keep the names of parameters (wrapping a layer, or weight_norm, changes them): make such "
                    "changes before attach()",
                    stacklevel=6,
                )
                return

    def note_forward(self, task: int, forward: Forward | None) -> None:
        """Note which variables outside of it a forward= reads, and their values, at the end of its task."""
        self._reads[task] = {} if forward is None else variables_of(forward)

    def _check_late(self, keeper: Keeper, task: int, reads: Mapping[str, object]) -> None:
        """Warn if a variable that the forward= of an old task reads has changed: it would run the head of another task."""
        forward = keeper.forwards[task] if task < len(keeper.forwards) else None
        uses = any(part.is_on and isinstance(part.term, Distils | Replays) for part in keeper.parts)
        now = variables_of(forward) if forward is not None and uses else {}
        for name, value in reads.items():
            if name in now and now[name] != value:
                self.once(
                    f"late {name}",
                    f"the forward= of task {task + 1} reads the variable {name!r}, which was {value!r} and is {now[name]!r} now, so old "
                    f"tasks are run as if they were others. Bind its value: forward=lambda m, b, {name}={name}: …",
                    stacklevel=6,
                )

    def check_names(self, unknown: Sequence[str], new: Sequence[str]) -> None:
        """Warn of a state with parameters that the model has not, if the model also has some that are not in the state."""
        if unknown and new:
            some, others = (", ".join(names[:3]) + (" …" if len(names) > 3 else "") for names in (unknown, new))
            self.once(
                "names",
                f"the model has no {some}, which are in the state; the state has no {others}, so these are not protected. If modules "
                "were renamed, rename the keys of the state too",
                stacklevel=5,
            )

    def check_choice(self, was_chosen: bool, chooses: bool, new: Sequence[str], tasks: int) -> None:
        """Warn of a state of a keeper with parameters=, loaded into one without: it has no Ω and no θ* of the others."""
        if was_chosen and not chooses and new and tasks:
            self.once(
                "choice",
                "the state is of a keeper that preserves some parameters only (parameters=), and this one preserves more: what the "
                "others learned so far is not protected; attach with the same parameters=",
                stacklevel=5,
            )

    def check_distance(self, parts: Iterable[Part], parameters: Mapping[str, Tensor]) -> None:
        """Warn if the weights of the model are far from θ* of a state that was loaded."""
        for part in parts:
            if not (far := self._drift(part, parameters)) > FAR:
                continue
            self.once(
                "distance",
                f"the weights of the model are far from those of the state (‖θ − θ*‖ is {far:.1f} ‖θ*‖): load the weights of the "
                "model before the state of the keeper",
            )

    def left_out(self, names: Sequence[str], kept: int) -> None:
        """Say which layers "auto" left out."""
        shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        self.once(
            "left out",
            f"{len(names)} of {len(names) + kept} hidden layers are left out, because no activation function was found right after them: "
            f"{shown} (print(keeper.describe()) shows all). If one of them is the output of a task, name the outputs: heads=[…]; to choose "
            "yourself, name activation modules: layers=[…]",
        )
