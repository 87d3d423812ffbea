"""The strategies, one paper a file; a new one is a file and a row of this table."""

from nearkin.method import Strategy
from nearkin.strategies.xbm import XBM

STRATEGIES: dict[str, type[Strategy]] = {
    "xbm": XBM,
}
