"""The model card of a run: README.md with YAML metadata, in the form that model hubs read.

It holds nothing of the machine and no dates, so that the same run gives the same card.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from nearkin.console import markdown_table, score_cells
from nearkin.data.datasets import path_of
from nearkin.data.images import counted
from nearkin.files import VERSION, Json, atomic_file, read_json
from nearkin.spec import parse
from nearkin.training.chosen_view import describe_view
from nearkin.training.expected import expected_markdown
from nearkin.training.run_folder import CARD_MARK, CHOSEN, RunFolder
from nearkin.training.seen_classes import SeenClasses

TAGS = ("nearkin", "metric-learning", "image-retrieval", "image-similarity", "embeddings")

_USE = """\
```python
import nearkin as nk

model = nk.load(".")  # this folder
vectors = model.embed(["image.jpg"])  # [1, {dim}]
```
"""


def write_card(run: RunFolder, result: Json) -> bool:
    """Write the model card of a run; a README.md that nearkin did not write stays, and False is returned."""
    if run.card.exists() and not run.has_own_card():
        return False
    with atomic_file(run.card) as temporary:
        temporary.write_text(model_card(read_json(run.config), result), encoding="utf-8", errors="backslashreplace")
    return True


def model_card(config: Json, result: Json) -> str:
    """Return the text of the card."""
    plan = config["plan"]
    data = _data_name(plan["data"])
    title = f"{parse(plan['method']).name} on {data}"
    parts = len(config.get("parts", ())) or 1
    changed = ", and perhaps changed by hand since" if config.get("saved") else ""
    about = (
        f"An image embedding model: images of the same class are near each other. The network is {plan['backbone']}, "
        f"trained with {config['method']}{changed}. It was made with nearkin {VERSION}."
    )
    sections = [
        f"# {title}\n\n{about}\n\n{_USE.format(dim=plan['dim'] * parts or 'N')}",
        f"## Scores\n\n{_scores(result, plan)}",
        f"## Data\n\n{_list(_data_facts(config, result, data))}",
        f"## Training\n\n{_list(_training_facts(plan, result, parts))}",
        f"## Limits\n\n{_list(_limits(result))}",
    ]
    return f"---\n{_metadata(result, title, data)}---\n\n" + "\n".join(sections)


def _metadata(result: Json, title: str, data: str) -> str:
    lines = [CARD_MARK.decode(), "pipeline_tag: image-feature-extraction", "tags:", *(f"- {tag}" for tag in TAGS)]
    scores = result.get("scores", {})
    if scores:
        lines += ["model-index:", f"- name: {_quoted(title)}", "  results:", "  - task:", "      type: image-retrieval"]
        lines += ["    dataset:", f"      type: {_quoted(data)}", f"      name: {_quoted(data)}", "    metrics:"]
        for name, value in scores.items():
            lines += [f"    - type: {_quoted(name)}", f"      name: {_quoted(f'{name}, percent')}"]
            lines += [f"      value: {value:.2f}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a string of JSON is one of YAML


def _data_name(spec: str) -> str:
    """Return the name of a data set without the folders it lies in, which concern nobody else."""
    place = path_of(spec)
    return spec if place is None else place.absolute().name


def _scores(result: Json, plan: Json) -> str:
    parts = []
    if expected := result.get("expected"):
        parts.append(expected_markdown(expected))
    elif not result.get("scores"):
        parts.append("This model was not measured.\n")
    if result.get("scores"):
        tested = result.get("test_classes")
        title = SeenClasses(**tested).title if tested else "Test classes"
        rows = {name: result[key] for name, key in (("before training", "before"), ("after", "scores"))}
        chosen = CHOSEN[plan["select"]]
        parts.append(
            f"{title}, percent. {counted(result['queries'], 'query', 'queries')}; the model is that of {chosen}.\n\n"
            f"{markdown_table(*score_cells(rows))}\n"
        )
    return "\n".join(parts)


def _data_facts(config: Json, result: Json, data: str) -> Iterator[str]:
    yield f"Data set: {data}."
    resolved = config.get("resolved", {})
    if "training_images" in resolved:
        classes = counted(resolved["training_classes"], "class", "classes")
        yield f"Trained on {counted(resolved['training_images'], 'image', 'images')} of {classes}."
    if result.get("scores") and (tested := result.get("test_classes")):
        yield f"Tested on {counted(tested['classes'], 'class', 'classes')}, {SeenClasses(**tested)}."
    if chosen := result.get("test_view"):
        yield f"Test images are shown at {describe_view(chosen)}."
    elif resolved.get("test_size", 0) not in (0, resolved.get("size")):
        yield f"Test images are shown at {resolved['test_size']} px of {resolved['test_short_side']}."
    if left_out := result.get("left_out"):
        yield f"{counted(left_out, 'query', 'queries')} without another image of the class left out of the scores."
    if unreadable := result.get("unreadable"):
        yield f"{counted(len(unreadable), 'image', 'images')} could not be read."


def _training_facts(plan: Json, result: Json, parts: int) -> Iterator[str]:
    if parts > 1:
        yield f"{parts} models, each with another block of training classes held out, joined side by side."
    if "kept_epoch" in result:
        yield f"Epochs: {result['kept_epoch']:g} of {plan['epochs']} kept, {CHOSEN[plan['select']]}."
    rate = f"{plan['optimiser']} with learning rate {plan['lr']:g}"
    yield f"Batches of {plan['batch']} images, {rate}, seed {plan['seed']}."
    initial = f"those of the run {Path(plan['start']).name}" if plan.get("start") else Path(plan["weights"]).name
    yield f"Initial weights: {initial}. Augmentation: {plan['augment']}."
    yield "`settings.toml` holds all settings: `nearkin train --config settings.toml --out FOLDER` repeats the run."


def _limits(result: Json) -> Iterator[str]:
    yield "It compares images by what tells its training classes apart. Other differences may be lost."
    if result.get("scores"):
        yield "The scores hold for images like the test images. More classes lower them, and so do other cameras."
        if result.get("test_classes", {}).get("seen"):
            yield "Test classes were seen in training, so the scores say little about other classes."
        yield "They are those of one seed. Another seed gives other scores."
    yield "A similarity alone says little: choose a threshold with `nearkin calibrate` on classes not trained on."
    yield "Biases of the training images, and of the initial weights, are those of the model."


def _list(sentences: Iterator[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"
