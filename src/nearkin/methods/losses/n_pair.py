"""N-pair. Sohn: Improved Deep Metric Learning with Multi-class N-pair Loss Objective. NIPS 2016.

A softmax of the positive of a sample against the negatives of all other classes.

    L = 1/|𝒫| Σ_{(i,j)∈𝒫} log(1 + Σ_{k∈N_i} exp(s_ik − s_ij))  +  λ/2 ( mean_i ‖x_i‖² + mean_j ‖v_j‖² )

Symbols
    𝒫 all pairs of a sample i and a reference j of its class, |𝒫| at least 1; N_i the references of other classes
    than i; s inner product of unnormalised embeddings (space `inner`); x, v samples and references, projected into
    the space; λ weight of the norms (`norm`); the means are over all rows and all columns without empty memory slots,
    or 0 if there are none. A pair without negatives adds log 1 = 0 and counts in |𝒫|.
    Weights multiply s of positives and negatives; not the norms.

Settings
    2 images per class: N classes make a batch of 2N. λ = 0.002 as in public code.

Departures
    The paper compares the N first images with the N second ones, one negative per class. Here every
    sample of a batch is compared with all others: twice the anchors, twice the negatives. With one reference per class
    (`profs`, proxies) it is the paper's form.
    Models are measured and searched by cosine: by inner products the longest vectors would be near to everything.
    With several positives, each has its own term (the paper has one positive).
    In training embeddings start with mean norm 4 (`short_start`): from long ones a pretrained network collapses.

Relations
    PROFS with M = 1 step per projection; `supcon` also has the other positives in the denominator, and a temperature.
    `angular` can add this loss.
"""

from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import EMPTY, Relation, log_sum_exp, mean_of_columns, mean_terms, mean_where, weighted
from nearkin.space import Space


def n_pair(r: Relation, weights: Tensor | None = None) -> Tensor:
    """Mean over positive pairs of the softmax loss against all negatives."""
    s = weighted(r.s, weights)
    negatives = log_sum_exp(s, r.neg, by="row")
    return mean_terms(r, F.softplus(negatives[:, None] - s, threshold=50), r.pos)


def mean_square_norm(r: Relation) -> Tensor:
    """Half the mean ‖x‖² of the samples plus half that of the references."""
    samples = mean_where(r.x.square().sum(1), r.rows != EMPTY)
    references = mean_of_columns(r, r.vectors.square().sum(1), r.columns != EMPTY)
    return (samples + references) / 2


class NPair(Loss):
    """N-pair with its norm regulariser."""

    space = Space.INNER
    images_per_class = 2
    one_per_class = True

    def __init__(self, *, norm: float = 0.002) -> None:
        super().__init__()
        zero_or_more("n_pair", norm=norm)
        self.norm = norm

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        loss = n_pair(r, weights)
        return loss + self.norm * mean_square_norm(r) if self.norm else loss
