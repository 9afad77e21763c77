"""The formulas, as pure functions of tensors: penalties on activations and weights, the pair form, the anchor.

Conventions, declared once. `h` holds post-activations of one layer: M samples × N neurons. Accepted shapes:

    (M, N)         a fully connected layer
    (M, T, N)      a transformer's MLP: every token is a sample
    (M, C, H, W)   a convolution (also (M, C, D, H, W)): neurons are channels, every position is a sample

Sums over pairs run over i ≠ j with both orders counted; they are divided by the number of samples and not by N.
The reference is Aljundi, Rohrbach and Tuytelaars, *Selfless Sequential Learning*, ICLR 2019, unless a docstring says otherwise.

**Signed activations.** The paper assumes h ≥ 0 (ReLU), where every product hᵢhⱼ costs. With GELU, tanh or SiLU the same formula
also *rewards* pairs of opposite sign, so R can be negative; it then pushes Σᵢhᵢ towards 0 rather than each neuron. `absolute=True`
penalises |hᵢ||hⱼ| instead, which is R of the paper for non-negative h and drives any activation to use few neurons.

**Precision.** Half precisions are computed in float32 (autocast included) and the value is returned in float32. Beyond N = 128 a sum over
pairs is a square of sums minus a sum of squares. Its error is about 10⁻⁷ of Σ_i h_i², far below the value unless hardly any two neurons
are active together. TF32 applies here where it is allowed for matmuls.

This room imports nothing of the package; every other room may import it.
"""

from selfless.functional.anchor import Anchor, anchor_share, anchor_value
from selfless.functional.pairs import DENSE, Discount, PairForm
from selfless.functional.penalties import decov, l1_param, l1_rep, l2_param, orth_reg, slni, slnid, sni, snid
from selfless.functional.shapes import samples

__all__ = [
    "DENSE", "Anchor", "Discount", "PairForm", "anchor_share", "anchor_value", "decov", "l1_param", "l1_rep", "l2_param", "orth_reg",
    "samples", "slni", "slnid", "sni", "snid",
]  # fmt: skip
