"""Embed in parts, also with killed workers, and read the parts back."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from made import make_images, make_run

import nearkin as nk
from nearkin.data.image_files import list_images
from nearkin.errors import NearkinError
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.search.index.folder import FolderIndex
from nearkin.search.parts import (
    Part,
    embed_one_part,
    embedded_files,
    measure_embedded,
    open_searchable,
    read_embeddings,
)

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, pictures, and their embeddings in four parts."""
    top = tmp_path_factory.mktemp("parts")
    make_run(top / "run")
    make_images(top / "pictures", classes=5, each=6)
    embed_all(top, top / "parts")
    return top


def embed_all(top, folder, total=4):
    images = list_images([top / "pictures"])
    return [embed_one_part(top / "run", images, folder, Part(n, total)) for n in range(1, total + 1)]


def read_all(place):
    """Paths, labels and vectors."""
    read = [batch for file in embedded_files(place) for batch in read_embeddings(file)]
    images = [image for batch in read for image in batch.images]
    vectors = np.concatenate([batch.vectors for batch in read])
    return [image.path for image in images], [image.label for image in images], vectors


@pytest.mark.parametrize(("count", "total"), [(0, 3), (2, 3), (30, 4), (31, 7)])
def test_parts_are_slices_that_cover_all(count, total):
    parts = [Part(number, total).of(range(count)) for number in range(1, total + 1)]
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3"])
def test_wrong_part_is_refused(text):
    with pytest.raises(NearkinError, match="--part"):
        Part.parse(text)


def test_parts_hold_every_image_once_in_order(made):
    images = list_images([made / "pictures"])
    paths, labels, vectors = read_all(made / "parts")
    assert paths == [image.path for image in images]
    assert labels == [image.label for image in images]
    assert np.allclose(vectors, nk.load(made / "run").embed(paths).numpy(), atol=1e-6)
    assert len(list((made / "parts").iterdir())) == 4


def test_finished_part_is_skipped_and_changed_list_is_not(made, tmp_path):
    images, run = list_images([made / "pictures"]), made / "run"
    assert embed_one_part(run, images, tmp_path, Part(1, 2))[:2] == (15, 0)
    left = tmp_path / "part-1-of-2.parquet.part"
    left.mkdir()  # as a kill just after the part was written leaves it
    assert embed_one_part(run, images, tmp_path, Part(1, 2))[:2] == (0, 15)
    assert not left.exists()
    embed_one_part(run, images[1:], tmp_path, Part(2, 2))
    with pytest.raises(NearkinError, match="different lists of images"):
        embedded_files(tmp_path)
    assert embed_one_part(run, images, tmp_path, Part(2, 2)).added == 15
    assert len(embedded_files(tmp_path)) == 2
    other = make_run(tmp_path / "other", seed=3)
    assert embed_one_part(other, images, tmp_path, Part(2, 2)).added == 15
    with pytest.raises(NearkinError, match="different lists of images or models"):
        embedded_files(tmp_path)


def test_missing_parts_are_named(made, tmp_path):
    images = list_images([made / "pictures"])
    embed_one_part(made / "run", images, tmp_path / "p", Part(2, 12))
    with pytest.raises(NearkinError, match=r"lacks 11 of 12 parts \(1, 3, .*--part 1/12"):
        embedded_files(tmp_path / "p")
    embed_one_part(made / "run", images, tmp_path / "p", Part(1, 3))
    with pytest.raises(NearkinError, match="of 3 and of 12 parts"):
        embedded_files(tmp_path / "p")
    assert embedded_files(made / "pictures") == []


def test_images_that_cannot_be_read_leave_an_empty_part(made, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"?")
    images = [*list_images([tmp_path / "bad.png"]), *list_images([made / "pictures"])[:1]]
    assert len(embed_one_part(made / "run", images, tmp_path / "p", Part(1, 2)).bad) == 1
    embed_one_part(made / "run", images, tmp_path / "p", Part(2, 2))
    assert read_all(tmp_path / "p")[0] == [images[1].path]


def test_index_takes_parts_as_they_are(made, tmp_path):
    files = embedded_files(made / "parts")
    done = index_images(made / "run", [], tmp_path / "i", embedded=files)
    assert (done.items, done.filled.added) == (30, 30)
    paths, labels, vectors = read_all(made / "parts")
    with open_index(tmp_path / "i") as index:
        assert index.items()[1:] == (paths, labels)
        assert np.allclose(index.embeddings(paths), vectors, atol=1e-6)
    again = index_images(made / "run", list_images([made / "pictures"]), tmp_path / "i", embedded=files)
    assert (again.filled.added, again.filled.kept) == (0, 60)  # the stamps are those of the files
    other = make_run(tmp_path / "other", seed=3)
    with pytest.raises(NearkinError, match="another model"):
        index_images(other, [], tmp_path / "j", embedded=files)
    assert not (tmp_path / "j").exists()


def test_embeddings_are_added_once_and_compared_with_their_own_items_only(made, tmp_path, monkeypatch):
    files = embedded_files(made / "parts")
    monkeypatch.setattr(FolderIndex, "_stamps", lambda _: pytest.fail("read all items"))
    done = index_images(made / "run", [], tmp_path / "i", embedded=[*files, files[0]])
    assert (done.items, done.filled.added, done.filled.kept) == (30, 30, 7)


def test_parts_are_searched_and_measured(made):
    with open_searchable(str(made / "parts")) as index:
        assert len(index) == 30
        vector = index.embeddings()[7:8]
        assert index.search(vector, 1)[0][0].path == list_images([made / "pictures"])[7].path
    paths, labels, _ = read_all(made / "parts")
    scores = measure_embedded(made / "run", made / "parts", metrics=("R@1", "MAP@R"))
    assert scores == pytest.approx(nk.evaluate(nk.load(made / "run").embed(paths), labels, metrics=("R@1", "MAP@R")))
    assert (scores.queries, scores.tested.classes) == (30, 5)


def test_an_image_without_a_label_counts_as_another_class(made, tmp_path):
    make_images(tmp_path / "p", classes=2, each=3)
    (tmp_path / "p" / "loose.png").write_bytes((tmp_path / "p" / "class 0" / "0.png").read_bytes())
    images = list_images([tmp_path / "p"])
    embed_one_part(made / "run", images, tmp_path / "e", Part(1, 1))
    scores = measure_embedded(made / "run", tmp_path / "e", metrics=("R@1",))
    assert (scores.queries, scores.left_out, scores.tested.classes) == (6, 1, 2)
    embed_one_part(made / "run", images[:1], tmp_path / "f", Part(1, 1))
    with pytest.raises(NearkinError, match="No image"):
        measure_embedded(made / "run", tmp_path / "f")


KILLED = """
import sys
from pathlib import Path
from nearkin.data.image_files import list_images
from nearkin.search import embed, parts

embed.CHUNK = 2
top = Path(sys.argv[1])
parts.embed_one_part(top / "run", list_images([top / "pictures"]), Path(sys.argv[2]), parts.Part(2, 3))
"""


def test_part_of_a_killed_worker_is_run_again(made, tmp_path):
    make_images(tmp_path / "pictures", classes=6, each=15)
    (tmp_path / "run").symlink_to(made / "run")
    images, folder = list_images([tmp_path / "pictures"]), tmp_path / "parts"
    work = folder / "part-2-of-3.parquet.part"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(folder)])
    while child.poll() is None and not (work.exists() and len(list(work.glob("items-*"))) > 1):
        time.sleep(0.005)
    child.kill()
    child.wait()
    held = len(open_index(work))
    assert 0 < held < 30
    with pytest.raises(NearkinError, match="lacks 3 of 3 parts"):
        embedded_files(folder)
    filled = [embed_one_part(tmp_path / "run", images, folder, Part(number, 3)) for number in (1, 2, 3)]
    assert [(one.added, one.kept) for one in filled] == [(30, 0), (30 - held, held), (30, 0)]
    assert read_all(folder)[0] == [image.path for image in images]
    assert not work.exists()


ON_RAY = """
import os, sys
from pathlib import Path
import ray
from nearkin.data.image_files import list_images
from nearkin.search import on_ray

top, folder = Path(sys.argv[1]), Path(sys.argv[2])

class Dying(on_ray.Worker):
    def __call__(self, row):
        from nearkin.search import embed
        embed.CHUNK, embed_chunk = 2, embed.embed_chunk
        done = 0

        def dying(*arguments):
            nonlocal done
            done += 1
            if done == 3 and not (folder / "died").exists():
                (folder / "died").write_text(str(os.getpid()))
                os.kill(os.getpid(), 9)
            return embed_chunk(*arguments)

        embed.embed_chunk = dying
        try:
            return super().__call__(row)
        finally:
            embed.embed_chunk = embed_chunk

on_ray.Worker, on_ray.IMAGES_PER_PART = Dying, 10
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
filled = on_ray.embed_on_ray(top / "run", list_images([top / "pictures"]), folder)
print(filled.added, filled.kept, [image.path.name for image in filled.bad])
"""


def test_killed_worker_of_ray_loses_nothing(made, tmp_path):
    pytest.importorskip("ray")
    make_images(tmp_path / "pictures", classes=4, each=10)
    (tmp_path / "pictures" / "class 3" / "9.png").write_bytes(b"?")
    (tmp_path / "run").symlink_to(made / "run")
    folder = tmp_path / "parts"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, str(tmp_path), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (folder / "died").exists(), done.stderr
    assert "35 4 ['9.png']" in done.stdout.splitlines(), done.stderr  # two commits of two were kept
    assert read_all(folder)[0] == [image.path for image in list_images([tmp_path / "pictures"])][:-1]


def test_without_ray_a_sentence_says_what_to_install(made, command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, errors = command("embed", made / "run", made / "pictures", "-o", tmp_path / "p", "--on", "ray")
    assert code == 2
    assert "pip install 'nearkin[ray]'" in errors


def test_commands_take_parts(made, command, tmp_path):
    for number in (1, 2):
        out = command("embed", made / "run", made / "pictures", "-o", tmp_path / "p", "--part", f"{number}/2")[1]
        assert out == f"15 images embedded: {tmp_path / 'p'}/part-{number}-of-2.parquet\n"
    assert "30 images" in command("index", made / "run", tmp_path / "p", "-o", tmp_path / "i")[1]
    query = made / "pictures" / "class 0" / "0.png"
    answers = [command("search", place, query, "--json")[1] for place in (tmp_path / "p", tmp_path / "i")]
    assert answers[0] == answers[1]
    assert "30 queries" in command("eval", made / "run", "--embeddings", tmp_path / "p")[1]
    for flags, wrong in (
        (("-o", "p.npz", "--part", "1/2"), "folder"),
        (("-o", "p", "--part", "1/2", "--on", "ray"), "--on"),
    ):
        code, _, errors = command("embed", made / "run", made / "pictures", *flags)
        assert code == 2
        assert wrong in errors
