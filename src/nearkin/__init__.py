"""nearkin: deep metric learning that trains, measures honestly and searches."""

__version__ = "0.1.0"
