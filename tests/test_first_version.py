"""Run folders and indexes written by the first version (commit 8a29820) open, resume and answer as they did there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from made import make_images

import nearkin as nk
from nearkin.search.index import open_index

FIXTURE = Path(__file__).parent / "fixtures" / "first_version"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A writable copy of the fixture beside the images it was trained on, as the working directory."""
    shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    make_images(Path("images"), classes=4, each=4)
    return tmp_path / "copy"


def test_a_finished_run_gives_the_same_embeddings(place):
    embeddings = nk.load("run").embed(EXPECTED["paths"])
    torch.testing.assert_close(embeddings, torch.tensor(EXPECTED["embeddings"]), atol=1e-5, rtol=0)


def test_an_interrupted_run_resumes_to_the_same_weights(place):
    nk.train(out="interrupted", resume=True)
    result = json.loads(Path("interrupted/result.json").read_text())
    assert result["scores"] == EXPECTED["resumed"]
    sums = {name: float(w.double().sum()) for name, w in nk.load("interrupted").embedder.state_dict().items()}
    assert sums == pytest.approx(EXPECTED["resumed_model"], abs=1e-4)


def test_an_index_gives_the_same_hits(place):
    with torch.no_grad():
        queries = nk.load("run").embed(EXPECTED["paths"])
    hits = open_index(Path("index")).search(queries.numpy(), k=3)
    assert [[hit.id for hit in row] for row in hits] == EXPECTED["hits"]
