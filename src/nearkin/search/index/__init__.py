"""An index of embeddings with one face for all stores: a folder, PostgreSQL with pgvector, Qdrant."""

from nearkin.search.index.base import KINDS, Hit, Index, Item, Kind
from nearkin.search.index.engines import create_index, open_index

__all__ = ["KINDS", "Hit", "Index", "Item", "Kind", "create_index", "open_index"]
