"""ProxyNCA++. Teh, DeVries, Taylor: ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis.
ECCV 2020.

Proxy-NCA as the probability of the proxy of a sample's class, sharpened by a temperature.

    L(X) = 1/|X'| Σ_{x∈X'} −log( e^{−d(x, p(x))/T} / (e^{−d(x, p(x))/T} + Σ_{z∈Z_x} e^{−d(x, z)/T}) )    (1)
    p(x) = argmin_{p∈P_x} d(x, p)                                                                        (2)

    Equation numbers are ours.

Symbols
    d squared Euclidean distance of the projected vectors (unit vectors: 2 − 2 cos); P_x the proxies of x's class;
    Z_x all proxies of all other classes; X' the samples of the batch X whose class has a proxy (else L = 0);
    T temperature (`temperature`). With weights ω [B, R], every exponent −d/T becomes (−d + 2(ω − 1) s)/T, as in
    `proxy_nca`, and p(x) is the proxy of the class of x with the largest exponent.

Settings
    T = 1/9, one proxy per class, ResNet-50 with global max pooling (`pool="max"`) and layer norm, batches balanced by
    class: 8 classes × 4 (CUB), 64 × 3 (SOP); proxies' learning rate × 1e5 (CUB), × 1e4 (SOP) under Adam with ε = 1;
    2,048-d (CUB), 512-d (SOP).

Departures
    The paper has one proxy per class; at `per_class` > 1 the positive is the nearest proxy of the class, and the
    other proxies of the class are in no sum.
    `speed` is 100, not 1e4 or 1e5: those belong to the authors' ε = 1, which divides every step.
    Max pooling and layer norm are settings of a run.

Relations
    `proxy_nca` leaves the positive out of the sum. With one proxy per class this is `norm_softmax` with T/2.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import cross_entropy, positive_exponent
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, minus_squared_distance


def proxy_nca_pp(r: Relation, *, temperature: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 1 with the references as proxies."""
    z = minus_squared_distance(r, weights) / temperature
    return cross_entropy(positive_exponent(z, r), z, r)  # Eq. 1, 2


class ProxyNCAPP(Loss):
    """ProxyNCA++ with `per_class` proxies per class, on batches balanced by class."""

    images_per_class = 4
    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        temperature: float = 1 / 9,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("proxy_nca_pp", temperature=temperature)
        self.temperature = temperature
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return proxy_nca_pp(r, temperature=self.temperature, weights=weights)
