"""The losses, one paper a file; a new one is a file and a row of this table."""

from nearkin.losses.contrastive import Contrastive
from nearkin.losses.proxy_anchor import ProxyAnchor
from nearkin.method import Loss

LOSSES: dict[str, type[Loss]] = {
    "contrastive": Contrastive,
    "proxy_anchor": ProxyAnchor,
}
