"""What the five papers claim, as data: whose method is said to beat what, by which metric, on CUB.

`base` is a method's name, or empty for the inner loss of each row itself. The results page tests every claim where both
sides were measured with the same seeds.
"""

from typing import NamedTuple


class Claim(NamedTuple):
    """One claim of a paper."""

    paper: str
    method: str  # rows whose outermost method this is
    base: str
    metric: str  # the metric the paper makes it by
    words: str  # what the paper says


CLAIMS = (
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor"),
    Claim("Proxy-ISA", "proxy_isa", "proxy_anchor", "MAP@R", "Proxy-ISA is above Proxy-Anchor in a fair setting"),
    Claim("CCP", "ccp", "", "MAP@R", "alternating sub-problems are above the pair loss they use"),
    Claim("MPA", "mpa", "soft_triple", "R@1", "MPA is above SoftTriple"),
    Claim("MPA", "mpa", "proxy_anchor", "R@1", "MPA is above Proxy-Anchor"),
    Claim("MPA", "mpa_dw", "soft_triple", "R@1", "MPA-DW is above SoftTriple"),
    Claim("MPA", "mpa_dw", "proxy_anchor", "R@1", "MPA-DW is above Proxy-Anchor"),
    Claim("MPA", "mpa_ap", "soft_triple", "R@1", "MPA-AP is above SoftTriple"),
    Claim("MPA", "mpa_ap", "proxy_anchor", "R@1", "MPA-AP is above Proxy-Anchor"),
    Claim("PROFS", "profs", "", "R@1", "projections with hard-class mining are above the loss they use"),
)
