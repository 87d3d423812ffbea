"""The model card: README.md of a run, in the form that model hubs read."""

import re

import pytest
import yaml
from made import make_images

import nearkin as nk
from nearkin.files import read_json
from nearkin.training.model_card import model_card, write_card
from nearkin.training.run_folder import RunFolder

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "epochs": 1, "device": "cpu", "metrics": ("R@1", "MAP@R")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    photos = folder / 'my "photos"'
    make_images(photos, classes=4, each=4)
    return nk.train(data=f"folder:{photos}", out=folder / "a", **TINY)


def metadata(text):
    return yaml.safe_load(re.fullmatch(r"---\n(.*?)---\n\n.*", text, re.DOTALL)[1])


def test_a_card_has_the_scores_in_words_and_for_machines(run):
    text, scores = run.card.read_text(), read_json(run.result)["scores"]
    about = metadata(text)
    assert (about["library_name"], about["pipeline_tag"]) == ("nearkin", "image-feature-extraction")
    (entry,) = about["model-index"]
    (result,) = entry["results"]
    assert result["dataset"] == {"type": 'my "photos"', "name": 'my "photos"'}
    assert {m["type"]: m["value"] for m in result["metrics"]} == {k: round(v, 2) for k, v in scores.items()}
    for section in ("Scores", "Data", "Training", "Limits"):
        assert f"\n## {section}\n" in text
    assert "Unseen classes, percent. 8 queries" in text
    assert f"| after | {scores['R@1']:.1f} | {scores['MAP@R']:.1f} |" in text
    assert "Trained on 8 images of 2 classes." in text


def test_a_model_hub_reads_the_card(run):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(run.card)
    assert card.data.library_name == "nearkin"
    assert {each.metric_type for each in card.data.eval_results} == {"R@1", "MAP@R"}


def test_the_same_run_has_the_same_card(run):
    again = nk.train(config=run.settings, out=run.path.with_name("b"), device="cpu")
    assert again.card.read_bytes() == run.card.read_bytes()
    assert str(run.path.parent) not in run.card.read_text(), "no path of this machine"


def test_a_card_does_not_hide_unfinished_runs_or_block_new_ones(run, tmp_path):
    (tmp_path / "README.md").write_text("# My own notes\n")
    assert RunFolder(tmp_path).leftovers() == []
    other = nk.train(config=run.settings, out=tmp_path, device="cpu")
    assert other.card.read_text() == "# My own notes\n"
    assert not write_card(other, read_json(other.result))
    other.card.write_bytes(run.card.read_bytes())
    assert "README.md" in other.leftovers()
    other.result.unlink()
    nk.train(out=other.path, resume=True)
    assert other.result.exists()


def test_a_card_says_whose_scores_are_expected_and_how_an_epoch_was_chosen(run):
    config, result = read_json(run.config), read_json(run.result)
    expected = {"run": "a", "scores": {"R@1": 55.5}, "queries": 8, "select": "test", "training_classes": 2}
    shipped = result | {"scores": {}, "expected": expected | {"test_classes": {"classes": 2, "seen": 0}}}
    text = model_card(config, shipped)
    assert "not measured on this model" in text
    assert "they are too high" in text
    assert "| expected, of a | 55.5 |" in text
    assert "model-index" not in metadata(text), "expected scores are not those of the model"
    chosen = config | {"plan": config["plan"] | {"select": "test"}}
    assert "ON THE TEST SET" in model_card(chosen, result)
    seen = result | {"test_classes": {"classes": 2, "seen": 1}}
    assert "Test classes, 1 of 2 seen in training, percent" in model_card(config, seen)
    assert "not measured" in model_card(config, result | {"scores": {}})
