"""Where the data of a run are: stored absolute and relative to the run folder, so that runs can be moved."""

import os
from pathlib import Path

from nearkin.data.datasets import at_path, path_of
from nearkin.data.own_archives import tar_files
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json
from nearkin.training.run_folder import RunFolder

ABSOLUTE, RELATIVE = "absolute", "relative"


def data_places(run: RunFolder, data: str) -> Json:
    """Return where a data set is, as its run stores it; empty for data without a path."""
    place = path_of(data)
    if place is None:
        return {}
    try:
        relative = os.path.relpath(place.resolve(), run.path.resolve())
    except ValueError:  # another drive
        relative = ""
    return {ABSOLUTE: str(place.absolute()), RELATIVE: relative}


def find_data(run: RunFolder) -> str:
    """Return the data set of a run where it is now: where it was, or as far from the run folder as it was."""
    config = read_json(run.config)
    if "plan" not in config:
        return find_data(run.parts()[0])
    data: str = config["plan"]["data"]
    written = path_of(data)
    if written is None:
        return data
    places = config.get("data_places", {})  # older runs have none
    if _is_there(written) and str(written.absolute()) == places.get(ABSOLUTE):
        return data
    tried = [Path(places[ABSOLUTE])] if ABSOLUTE in places else [written]
    if places.get(RELATIVE):
        tried.append(Path(os.path.normpath(run.path.resolve() / places[RELATIVE])))
    for place in tried:
        if _is_there(place):
            return at_path(data, place)
    name = data.partition(":")[0]
    raise NearkinError(
        f"The data of {run.path} are no longer at {' or '.join(map(str, tried))}: give their new location with "
        f"--data {name}:PATH."
    )


def _is_there(place: Path) -> bool:
    """Whether there are data at a path, or at names of its pattern."""
    return place.exists() or bool(tar_files(place))
