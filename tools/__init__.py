"""Generators of the documentation; not part of the package."""
