"""Slow and obvious reference implementations: loops over samples and pairs, mostly in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfless.network.calling import labels_of, run_batch


def pairs(h: Tensor, sigma: float | None = None, alpha: Tensor | None = None, discount: str = "product") -> Tensor:
    """1/M Σ_{i≠j} K_ij D_ij Σ_m hᵢ hⱼ with the full N×N matrix K D, in float64. K = 1 without sigma, D = 1 without alpha."""
    h, n = h.double(), h.shape[1]
    i = torch.arange(n, dtype=torch.float64)
    weight = torch.ones(n, n, dtype=torch.float64) if sigma is None else torch.exp(-((i[:, None] - i) ** 2) / (2 * sigma**2))
    if alpha is not None:
        a = alpha.double()
        weight = weight * torch.exp(-(a[:, None] + a) if discount == "product" else -torch.maximum(a[:, None], a))
    weight = weight - torch.diag(weight.diagonal())
    return torch.einsum("mi,ij,mj->", h, weight, h) / len(h)


def looped(h: Tensor, sigma: float | None = None) -> float:
    """1/M Σ_m Σ_{i≠j} K_ij hᵢ hⱼ in three Python loops: the definition itself."""
    total = 0.0
    for row in h.tolist():
        for i, a in enumerate(row):
            for j, b in enumerate(row):
                if i != j:
                    total += a * b * (1.0 if sigma is None else float(torch.exp(torch.tensor(-((i - j) ** 2) / (2 * sigma**2)).double())))
    return total / len(h)


def decov(h: Tensor) -> Tensor:
    """½ (‖C‖² − ‖diag C‖²), C the covariance matrix of h."""
    c = torch.cov(h.T, correction=0)
    return 0.5 * (c.square().sum() - c.diagonal().square().sum())


def _slice(batch: Any, m: int) -> Any:
    if isinstance(batch, dict):
        return {k: v[m : m + 1] for k, v in batch.items()}
    return tuple(v[m : m + 1] for v in batch) if isinstance(batch, (tuple, list)) else batch[m : m + 1]


def _size(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, (tuple, list)) else batch)


def mas_loss(output: Tensor, label: Tensor | None) -> Tensor:
    """‖f(x)‖²."""
    return output.square().sum()


def log_likelihood(output: Tensor, label: Tensor | None) -> Tensor:
    """log p(y|x), summed over positions."""
    assert label is not None
    return output.log_softmax(-1).flatten(0, -2)[torch.arange(label.numel()), label.flatten()].sum()


def omega(model: nn.Module, batches: list[Any], loss: Callable[[Tensor, Tensor | None], Tensor], power: int) -> dict[str, Tensor]:
    """mean_m |∂L_m/∂θ|ᵖ with one forward and one backward pass per sample."""
    model.eval()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    count = 0
    for batch in batches:
        for m in range(_size(batch)):
            one = _slice(batch, m)
            value = loss(run_batch(model, one), labels_of(one))
            grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
            for n, g in zip(named, grads, strict=True):
                if g is not None:
                    total[n] += g.abs() if power == 1 else g.square()
            count += 1
    return {n: t / count for n, t in total.items()}


def omega_per_batch(model: nn.Module, batches: list[Any], loss: Callable[[Tensor, Tensor | None], Tensor], power: int) -> dict[str, Tensor]:
    """1/M Σ_batches |∂ Σ_{m∈batch} L_m/∂θ|ᵖ, as in the authors' code."""
    model.eval()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    for batch in batches:
        values = [loss(run_batch(model, _slice(batch, m)), labels_of(_slice(batch, m))) for m in range(_size(batch))]
        grads = torch.autograd.grad(torch.stack(values).sum(), list(named.values()), allow_unused=True)
        for n, g in zip(named, grads, strict=True):
            if g is not None:
                total[n] += g.abs() if power == 1 else g.square()
    return {n: t / sum(map(_size, batches)) for n, t in total.items()}


def exact_fisher(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """mean_m Σ_c p_c (∂ log p_c/∂θ)²."""
    model.eval()
    named = dict(model.named_parameters())
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    count = 0
    for batch in batches:
        for m in range(_size(batch)):
            logp = run_batch(model, _slice(batch, m)).log_softmax(-1)[0]
            for c in range(len(logp)):
                grads = torch.autograd.grad(logp[c], list(named.values()), retain_graph=True)
                for n, g in zip(named, grads, strict=True):
                    total[n] += logp[c].exp().detach() * g.square()
            count += 1
    return {n: t / count for n, t in total.items()}


def alpha(model: nn.Module, pre: Callable[[nn.Module, Tensor], Tensor], post: Callable[[nn.Module, Tensor], Tensor], xs: Tensor) -> Tensor:
    """mean_m |∂‖f(x_m)‖²/∂n|, n = pre(model, x), f = post(model, n). The test splits the network at the pre-activation n."""
    total = 0
    for m in range(len(xs)):
        n = pre(model, xs[m : m + 1]).detach().requires_grad_()
        (g,) = torch.autograd.grad(post(model, n).square().sum(), n)
        total = total + g[0].abs()
    return total / len(xs)


def lwf(z: Tensor, old: Tensor, temperature: float) -> Tensor:
    """Li & Hoiem's modified cross-entropy minus its value at z = old, sample by sample and class by class."""
    total = torch.zeros((), dtype=torch.float64)
    for row, was in zip(z.double(), old.double(), strict=True):
        p = [torch.exp(v / temperature) / sum(torch.exp(u / temperature) for u in row) for v in row]
        q = [torch.exp(v / temperature) / sum(torch.exp(u / temperature) for u in was) for v in was]
        total = total - sum(b * torch.log(a) for a, b in zip(p, q, strict=True)) + sum(b * torch.log(b) for b in q)
    return total / len(z)


def code_drift(features: Tensor, before: Tensor, encoders: Tensor, weight: float) -> float:
    """a/2 mean_m Σ_t ‖σ(W_t f_m) − σ(W_t f*_m)‖² of EBLL, unit by unit."""

    def unit(w: Tensor, f: Tensor) -> float:
        return 1 / (1 + math.exp(-sum(float(a) * float(b) for a, b in zip(w, f, strict=True))))

    total = sum((unit(w, f) - unit(w, g)) ** 2 for f, g in zip(features, before, strict=True) for encoder in encoders for w in encoder)
    return weight / 2 * total / len(features)


def encoder(
    start: tuple[Tensor, Tensor], batches: list[tuple[Tensor, Tensor]], head: tuple[Tensor, Tensor], b: float, rate: float
) -> Tensor:
    """W of EBLL's autoencoder r(f) = V σ(W f) after training on batches of (features, labels), with the chain rule written out by entries.

    The loss is b‖r(f) − f‖² + CE(head(r(f))), with one step of Adam per batch. Adam acts on W·l, where l is the mean of Σ|f| over the
    first batch.
    """
    l = sum(float(f.abs().sum()) for f in batches[0][0]) / len(batches[0][0])
    W, V = (t.double().clone() for t in start)
    W *= l
    H, h = (t.double() for t in head)
    moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in (W, V)]
    for step, (features, labels) in enumerate(batches, 1):
        gradients = [torch.zeros_like(W), torch.zeros_like(V)]
        for f, y in zip(features.double(), labels, strict=True):
            c = [1 / (1 + math.exp(-float(w @ f) / l)) for w in W]
            r = [sum(float(V[k, j]) * c[j] for j in range(len(c))) for k in range(len(f))]
            z = [math.exp(float(h[i]) + sum(float(H[i, k]) * r[k] for k in range(len(f)))) for i in range(len(h))]
            p = [value / sum(z) for value in z]
            for k in range(len(f)):
                given = 2 * b * (r[k] - float(f[k])) + sum((p[i] - (i == int(y))) * float(H[i, k]) for i in range(len(h)))
                for j in range(len(c)):
                    gradients[1][k, j] += given * c[j] / len(features)
                    gradients[0][j] += given * V[k, j] * c[j] * (1 - c[j]) * f / l / len(features)
        for value, (first, second), g in zip((W, V), moments, gradients, strict=True):
            first.mul_(0.9).add_(0.1 * g)
            second.mul_(0.999).add_(0.001 * g * g)
            value -= rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return W / l


def merged(optima: list[dict[str, Tensor]], weights: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """Σ_k F_k θ_k / Σ_k F_k from the stored optima θ_k of all tasks; the plain mean without weights F_k."""
    names = optima[0]
    if weights is None:
        return {n: sum(o[n] for o in optima) / len(optima) for n in names}  # type: ignore[misc]
    return {n: sum(w[n] * o[n] for o, w in zip(optima, weights, strict=True)) / sum(w[n] for w in weights) for n in names}  # type: ignore[misc]


def drop_transfer(theta: Tensor, before: Tensor, off: list[bool], p: float) -> Tensor:
    """θ̃ = θ* where a node is off, else (θ − p θ*)/(1 − p): IMM's drop-transfer of a layer, entry by entry."""
    rows = [
        [float(b) if gone else float(t) / (1 - p) - p / (1 - p) * float(b) for t, b in zip(row.flatten(), old.flatten(), strict=True)]
        for row, old, gone in zip(theta, before, off, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(theta.shape)


def packed(weights: list[float], owner: list[int], task: int, share: float) -> list[int]:
    """PackNet's owner of each weight after a task. The smallest `share` of the free ones (owner 0) stays free; the task gets the rest."""
    free = sorted((abs(w), i) for i, w in enumerate(weights) if owner[i] == 0)
    gone = {i for _, i in free[: int(share * len(free))]}
    return [task if owner[i] == 0 and i not in gone else owner[i] for i in range(len(weights))]


def hebbian(weights: list[Tensor], biases: list[Tensor], xs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(Ω of W, Ω of b) = mean_m |2 y_i x_j| and mean_m |2 y_i| for each layer of a ReLU MLP with a linear last layer, by samples."""
    total = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in zip(weights, biases, strict=True)]
    for sample in xs:
        x = sample
        for l, (w, b) in enumerate(zip(weights, biases, strict=True)):
            n = w @ x + b
            y = n if l == len(weights) - 1 else n.clamp(min=0)
            for i in range(len(y)):
                for j in range(len(x)):
                    total[l][0][i, j] += (2 * y[i] * x[j]).abs() / len(xs)
                total[l][1][i] += (2 * y[i]).abs() / len(xs)
            x = y
    return total


def rwalk(steps: list[tuple[float, float, float]], average: float, every: int, damping: float, fisher: float = 0.0) -> tuple[float, float]:
    """(F, s) of RWalk for one parameter after steps (θ before, θ after, g): its two recursions."""
    score, path, start = 0.0, 0.0, steps[0][0]
    for k, (before, after, g) in enumerate(steps, 1):
        fisher = average * g * g + (1 - average) * fisher
        path -= g * (after - before)
        if k % every == 0 or k == len(steps):
            score += max(0.0, path) / (0.5 * fisher * (after - start) ** 2 + damping)
            path, start = 0.0, after
    return fisher, score


def hat_gradient(e: Tensor, given: Tensor, s: float, s_max: float, clamp: float) -> Tensor:
    """∂loss/∂e for a = σ(s·e) as in the code of HAT's authors, in float64: the chain rule, then the compensation with clamped cosh."""
    e = e.double()
    a = torch.sigmoid(s * e)
    q = given.double() * s * a * torch.sigmoid(-s * e)
    return q * s_max / s * (torch.cosh((s * e).clamp(-clamp, clamp)) + 1) / (torch.cosh(e) + 1)


def reservoir(n: int, samples: int, generator: torch.Generator) -> list[int]:
    """Vitter's algorithm R, sample by sample: sample i replaces a random place with probability samples/(i + 1)."""
    kept: list[int] = []
    for i in range(n):
        if i < samples:
            kept.append(i)
        elif (place := int(torch.randint(i + 1, (), generator=generator))) < samples:
            kept[place] = i
    return kept


def der(outputs: Tensor, logits: Tensor, labels: Tensor, own: list[range], among: list[range], beta: float) -> list[float]:
    """1/C Σ_c (z_c − z*_c)² over the columns of the sample's own task + β (log Σ_c e^{z_c} − z_y) over those it is classified among."""
    values = []
    for z, old, y, mine, all_of in zip(outputs.tolist(), logits.tolist(), labels.tolist(), own, among, strict=True):
        gap = sum((z[c] - old[c]) ** 2 for c in mine) / len(mine)
        values.append(gap + beta * (math.log(sum(math.exp(z[c]) for c in all_of)) - z[y]))
    return values


def sparseness(values: list[float]) -> float:
    """(1 − (Σ|v|/n)² / (Σv²/n)) / (1 − 1/n): Vinje and Gallant's sparseness of n responses."""
    n = len(values)
    return (1 - (sum(abs(v) for v in values) / n) ** 2 / (sum(v * v for v in values) / n)) / (1 - 1 / n)


def mean_correlation(h: Tensor) -> float:
    """The mean |ρ| over pairs of columns that vary, one pair at a time."""
    columns = [h[:, i] for i in range(h.shape[1]) if float(h[:, i].std()) > 0]
    found = [abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) for i, a in enumerate(columns) for b in columns[:i]]
    return sum(found) / len(found)


def participation(h: Tensor) -> float:
    """(Σ λ)² / Σ λ² over the eigenvalues λ of the covariance matrix."""
    values = torch.linalg.eigvalsh(torch.cov(h.T, correction=0))
    return float(values.sum() ** 2 / values.square().sum())


def sparing_decov(h: Tensor, alpha: Tensor, sigma: float | None, discount: str) -> Tensor:
    """½ Σ_{i≠j} K_ij D_ij C_ij², one pair at a time."""
    c, total = torch.cov(h.T, correction=0), torch.zeros((), dtype=h.dtype)
    for i in range(h.shape[1]):
        for j in range(h.shape[1]):
            if i != j:
                near = 1.0 if sigma is None else math.exp(-((i - j) ** 2) / (2 * sigma**2))
                spared = alpha[i] + alpha[j] if discount == "product" else torch.maximum(alpha[i], alpha[j])
                total = total + 0.5 * near * torch.exp(-spared) * c[i, j] ** 2
    return total


def gpm(inputs: list[np.ndarray], energies: list[float], alpha: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """GPM's basis M (d, k) and λ (k,) after tasks whose inputs are the columns of R (d, n), by SVD; SGP's if `alpha` is given."""
    basis, scale = np.zeros((len(inputs[0]), 0)), np.zeros(0)
    for r, energy in zip(inputs, energies, strict=True):
        inside = basis @ basis.T @ r
        u, s, _ = np.linalg.svd(r - inside)
        total, k = (r**2).sum(), 0
        while (inside**2).sum() + (s[:k] ** 2).sum() < energy * total:
            k += 1
        sizes = np.concatenate([np.linalg.norm(basis.T @ r, axis=1), s[:k]])
        new = np.ones_like(sizes) if alpha is None else (alpha + 1) * sizes / (alpha * sizes + sizes.max(initial=0))
        scale = np.minimum(1, np.concatenate([scale, np.zeros(k)]) + new)
        basis = np.concatenate([basis, u[:, :k]], 1)
    return basis, scale


def shrunk(point: np.ndarray, centre: np.ndarray, amount: float) -> np.ndarray:
    """argmin_θ ½‖θ − point‖² + amount ‖θ − centre‖, by ternary search: off the line from centre to point, both terms are larger."""

    def cost(share: float) -> float:
        gap = share * (point - centre)
        return float(0.5 * ((centre + gap - point) ** 2).sum() + amount * np.sqrt((gap**2).sum()))

    low, high = 0.0, 1.0
    for _ in range(100):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return centre + low * (point - centre)
