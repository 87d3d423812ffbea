"""Images and data sets: reading, splitting, and the embedded default."""

from nearkin.data.datasets import DATASETS, Reader, describe, load_dataset
from nearkin.data.images import Dataset, Images
from nearkin.data.splits import held_out, sample_fraction

__all__ = ["DATASETS", "Dataset", "Images", "Reader", "describe", "held_out", "load_dataset", "sample_fraction"]
