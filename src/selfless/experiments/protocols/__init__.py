"""The paper's protocols as runs, and the grids that strengths are chosen from. Every experiment takes its candidates from here, so that
equal cells are equal runs and are trained once. It imports `spec`, `preserve`, `sparsify` and `experiments.base`; the
modules of the experiments import it.

paper   the authors' settings: Ω from batch gradients, the epoch that is best on the test data, published strengths where there are any,
        for competitors "from 10⁻² to 10⁻⁹, the best one reported", evaluated on test data
ours    exact Ω, an implicit anchor, the last epoch, strengths chosen on held-out data
equal   as ours, with the same grid of decades for every row of a table and `base.EQUAL`: grids grow while the best stands at an end, then
        get half decades around it, and the best few are scored by more seeds

The strength of the anchor is chosen separately for each method.
"""

from selfless.experiments.protocols.cifar_100 import (
    BLURRED_IMPLICIT,
    CIFAR_128,
    CIFAR_ANCHORS,
    CIFAR_EVERYWHERE,
    CIFAR_IMPLICIT,
    CIFAR_INHIBITION,
    blurred_cifar,
    cifar,
    cifar_best,
)
from selfless.experiments.protocols.mnist import (
    EWC_ANCHORS,
    EWC_DEMO,
    EWC_INHIBITION,
    PMNIST_ANCHORS,
    permuted_mnist,
    permuted_mnist_best,
    with_ewc,
)
from selfless.experiments.protocols.protocol import ALL_LAYERS, COMPETITORS, DECADES, INHIBITION, KINDS, Grid, Protocol, over
from selfless.experiments.protocols.tiny import (
    TINY_ANCHORS,
    TINY_ASIDE,
    TINY_IMPLICIT,
    TINY_INHIBITION,
    TINY_PLAIN,
    tiny_best,
    tiny_imagenet,
)

__all__ = [
    "ALL_LAYERS",
    "BLURRED_IMPLICIT",
    "CIFAR_128",
    "CIFAR_ANCHORS",
    "CIFAR_EVERYWHERE",
    "CIFAR_IMPLICIT",
    "CIFAR_INHIBITION",
    "COMPETITORS",
    "DECADES",
    "EWC_ANCHORS",
    "EWC_DEMO",
    "EWC_INHIBITION",
    "INHIBITION",
    "KINDS",
    "PMNIST_ANCHORS",
    "TINY_ANCHORS",
    "TINY_ASIDE",
    "TINY_IMPLICIT",
    "TINY_INHIBITION",
    "TINY_PLAIN",
    "Grid",
    "Protocol",
    "blurred_cifar",
    "cifar",
    "cifar_best",
    "over",
    "permuted_mnist",
    "permuted_mnist_best",
    "tiny_best",
    "tiny_imagenet",
    "with_ewc",
]
