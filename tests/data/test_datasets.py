"""The table of data sets, their specs, and their counts."""

import pytest
from image_helpers import numbered_images

from nearkin.data import DATASETS, Dataset, describe, load_dataset
from nearkin.errors import NearkinError


def test_the_help_shows_the_form_of_each_spec():
    assert set(DATASETS) == {"glyphs", "folder", "csv", "tar", "arrow", "cub", "cars", "sop", "inshop"}
    assert all(reader.help for reader in DATASETS.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("club:/data", "Did you mean 'cub'"),
        ("cub", "needs a path: write cub:PATH"),
        ("cub:", "needs a path"),
        ("glyphs:/data", "takes no path"),
        ("glyphs(clases=5)", "Did you mean 'classes'"),
        ("cub(expect=None):/data", "no option 'expect'"),
        ("glyphs(x)", "key=value"),
        ("/no/such/place", "write one of glyphs, folder:PATH"),
        ("", "write one of"),
        ("folder:/no/such/place", "no folder /no/such/place"),
        ("csv:/no/such/place", "no file /no/such/place"),
        ("inshop:/no/such/place", "list_eval_partition.txt"),
        ("sop:/no/such/place", "lifted_struct"),
    ],
)
def test_wrong_specs_are_refused(text, says):
    with pytest.raises(NearkinError, match=says.replace("(", r"\(")):
        load_dataset(text)


def test_the_error_for_a_bare_folder_shows_the_spec(tmp_path):
    with pytest.raises(NearkinError, match=f"folder:{tmp_path}"):
        load_dataset(str(tmp_path))


def test_halves_is_one_of_two(tmp_path):
    with pytest.raises(NearkinError, match="'first' or 'swapped'"):
        load_dataset("glyphs", halves="second")


def test_describe_counts_images_per_class():
    dataset = Dataset("made", numbered_images([1, 4, 3]), numbered_images([2, 2], first=3))
    train, test = describe(dataset)
    assert train == ("train", 8, 3, 1, 3.0, 4)
    assert test == ("test", 4, 2, 2, 2.0, 2)
