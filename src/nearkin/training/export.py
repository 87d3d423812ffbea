"""Export a trained model for other runtimes: as an ONNX file, or as a torch.export program.

The exported network maps normalised images [B, channels, size, size] to embeddings [B, dim], for any B. The file
describes the preprocessing as JSON (`describe`). It is written only if the other runtime's embeddings equal ours on
real images.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.data.images import counted
from nearkin.data.pixels.open import open_inputs
from nearkin.errors import NearkinError
from nearkin.files import VERSION, Json, atomic_file
from nearkin.training.model import Model, load

TOLERANCE = 1e-4
"""Largest allowed difference of an embedding with norm 1."""

INPUT, OUTPUT, METADATA = "images", "embeddings", "nearkin"
BATCH = ({0: torch.export.Dim("batch", min=1)},)
"""The only dimension of the input that may vary."""

Run = Callable[[Tensor], Tensor]  # network inputs → embeddings, by the runtime of the exported file


class Exported(NamedTuple):
    """A written file, and how its embeddings compare with ours."""

    path: Path
    about: Json
    images: int  # number of images it was checked on
    difference: float  # largest of any entry of any embedding


def export(run: str | Path, out: str | Path, *, images: Sequence[str | Path] = ()) -> Exported:
    """Write the model of a run to `out`: .onnx, or .pt2 for torch.export.

    The file is checked on `images`, by default on photographs from scikit-learn.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise NearkinError(f"Export a model as .onnx or .pt2 (torch.export), not as {out.name!r}.")
    model = load(run, device="cpu")
    about = describe(model)
    examples: list[Path] | Tensor = [Path(p) for p in images] if images else photographs()
    inputs = network_inputs(model, examples)
    ours = model.embed(examples)
    with atomic_file(out) as temporary, _quiet_torch():
        theirs = WRITERS[out.suffix](_program(model, inputs), temporary, about)
        difference = max(_difference(theirs, inputs, ours), _difference(theirs, inputs[:1], ours[:1]))
        if not difference <= TOLERANCE:
            raise NearkinError(
                f"Nothing was written to {out}: on {counted(len(ours), 'image', 'images')} its embeddings differ from "
                f"ours by {difference:.1e}, and {TOLERANCE:.0e} is allowed."
            )
    return Exported(out, about, len(ours), difference)


def describe(model: Model) -> Json:
    """Describe input, preprocessing and output, so that they can be rebuilt elsewhere."""
    known = model.preprocessing()
    size, short, channels, bgr = known["size"], known["short"], known["channels"], known["bgr"]
    stored, how = known["stored"], "the long side in proportion and rounded down, bilinear with antialiasing"
    return {
        "nearkin": VERSION,
        "input": {"name": INPUT, "type": "float32", "shape": ["batch", channels, size, size]},
        "preprocessing": [
            "rotate the image as its orientation tag says; put transparent pixels on white",
            "if one side is more than twice the other, crop it at both ends to twice",
            *(
                [f"if the short side is longer than {stored}, resize it to {stored}: {how}, in 8 bits"]
                if stored
                else []
            ),
            f"resize to a short side of {short}: {how}, in 8 bits",
            "grey = 0.299 R + 0.587 G + 0.114 B" if channels == 1 else "RGB",
            f"crop the central {size} × {size}; odd margins are halved to the nearest even number",
            "(pixel / 255 - mean) / std, channel by channel" + (", then BGR" if bgr else ""),
        ],
        "size": size,
        "stored_side": stored or None,
        "short_side": short,
        "resize": "bilinear, antialiased",
        "crop": "centre",
        "channel_order": "grey" if channels == 1 else "BGR" if bgr else "RGB",
        "mean": known["mean"],  # in the order R, G, B
        "std": known["std"],
        "output": {"name": OUTPUT, "type": "float32", "shape": ["batch", model.embedder.dim]},
        "space": model.embedder.space.value,
        "normalised": model.embedder.space.has_unit_norm,
    }


def photographs() -> Tensor:
    """Return eight real images: the quarters of two photographs, uint8 [8, 3, h, w]."""
    from sklearn.datasets import load_sample_images

    both = np.stack(load_sample_images().images)[:, :426, :640]
    quarters = torch.from_numpy(both).unfold(1, 213, 213).unfold(2, 320, 320)  # [2, 2, 2, 3, 213, 320]
    return quarters.flatten(0, 2).contiguous()


def network_inputs(model: Model, images: Sequence[Path] | Tensor) -> Tensor:
    """Return the network inputs of images, [N, channels, size, size]."""
    channels = model.embedder.trunk.channels
    store = open_inputs(images, **model.storage._asdict(), channels=channels, device=model.device)
    return model.view(store[torch.arange(len(store))])


def _program(model: Model, inputs: Tensor) -> Any:
    """Return the network as a torch.export program for batches of any size."""
    two = inputs[:1].repeat(2, 1, 1, 1)  # with an example of size 1 the program would accept no other
    for parameter in model.embedder.parameters():
        parameter.requires_grad_(False)
    return torch.export.export(model.embedder, (two,), dynamic_shapes=BATCH)


def _write_onnx(program: Any, path: Path, about: Json) -> Run:
    try:
        import onnxruntime  # type: ignore[import-untyped]
        import onnxscript  # noqa: F401 (torch needs it; its own error message is long)
    except ImportError as error:
        raise NearkinError(f"ONNX needs the package {error.name}: pip install 'nearkin[export]'.") from None
    made = torch.onnx.export(
        program, (), dynamo=True, input_names=[INPUT], output_names=[OUTPUT], dynamic_shapes=BATCH, verbose=False
    )
    assert made is not None
    graph = made.model.graph
    for node in (graph, *graph, *graph.inputs, *graph.outputs):
        node.metadata_props.clear()  # paths of the source code on this machine
    made.model.metadata_props[METADATA] = json.dumps(about)
    made.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run([OUTPUT], {INPUT: x.numpy()})[0])


def _write_program(program: Any, path: Path, about: Json) -> Run:
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={f"{METADATA}.json": json.dumps(about)})
    run: Run = program.module()
    return run


WRITERS: dict[str, Callable[[Any, Path, Json], Run]] = {".onnx": _write_onnx, ".pt2": _write_program}
"""Suffix → function that writes such a file and returns a function that runs it."""


@torch.no_grad()
def _difference(theirs: Run, inputs: Tensor, ours: Tensor) -> float:
    """Return the largest difference of any entry; if the norm is not 1, relative to the largest entry."""
    return float((theirs(inputs) - ours).abs().max() / ours.abs().max().clamp_min(1))


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence torch's warnings about deprecations and operator versions, which do not concern the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
