"""An index of embeddings with one interface for all engines: a folder, PostgreSQL with pgvector, Qdrant, Lance."""

from nearkin.search.index.base import Hit, Index, Item, create_index, open_index
from nearkin.search.index.engines import ENGINES, KINDS, Kind

__all__ = ["ENGINES", "KINDS", "Hit", "Index", "Item", "Kind", "create_index", "open_index"]
