"""The formulas, as pure functions of tensors: penalties on activations and weights, the pair form, the anchor, damping, the reservoir.

Conventions for all of them. `h` holds post-activations of one layer: M samples × N neurons. Accepted shapes:

    (M, N)         a fully connected layer
    (M, T, N)      a transformer's MLP: every token is a sample
    (M, C, H, W)   a convolution (also (M, C, D, H, W)): neurons are channels, every position is a sample

A sum over pairs counts (i, j) and (j, i), i ≠ j. It is divided by the number of samples M, not by N.
The reference is Aljundi, Rohrbach and Tuytelaars, *Selfless Sequential Learning*, ICLR 2019, unless a docstring says otherwise.

**Signed activations.** The paper assumes h ≥ 0 (ReLU), so that every product hᵢhⱼ adds to the penalty. With GELU, tanh or SiLU a pair of
opposite sign lowers the penalty, R can be negative, and its minimum has Σᵢhᵢ near 0 instead of few active neurons. `absolute=True`
penalises |hᵢ||hⱼ| instead. For h ≥ 0 this equals R of the paper, and for any activation it leads to few active neurons.

**Precision.** float16 and bfloat16 are computed in float32, also under autocast, and the value is returned in float32. For N > 128 a sum
over pairs is computed as a square of sums minus a sum of squares. The error is about 10⁻⁷ of Σ_i h_i², which matters only if hardly any
two neurons are active together. TF32 is used where torch allows it for matmuls.

Imports nothing. Imported by bench, engine, importance, keeper, preserve and sparsify.
"""

from selfless.functional.anchor import Anchor, anchor_share, anchor_value
from selfless.functional.damping import damping, largest_curvature, measures_curvature
from selfless.functional.pairs import DENSE, Discount, PairForm, pair_values
from selfless.functional.penalties import decov, l1_param, l1_rep, l2_param, orth_reg, slni, slnid, sni, snid, sparing_decov
from selfless.functional.reservoir import reservoir
from selfless.functional.shapes import samples

__all__ = [
    "DENSE", "Anchor", "Discount", "PairForm", "anchor_share", "anchor_value", "damping", "decov", "l1_param", "l1_rep", "l2_param",
    "largest_curvature", "measures_curvature", "orth_reg", "pair_values", "reservoir", "samples", "slni", "slnid", "sni", "snid",
    "sparing_decov",
]  # fmt: skip
