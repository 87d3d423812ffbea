"""The picture one would rather look at: queries with their nearest neighbours, kin framed green, others red."""

from pathlib import Path

import torch
from torch import Tensor

from nearkin.data.images import Images
from nearkin.measure import Embedded
from nearkin.report.sheets import RIGHT, WRONG, Picture, contact_sheet
from nearkin.similarity import Space, pairwise, project


def nearest_rows(x: Tensor, images: Images, queries: Tensor, k: int, space: Space) -> tuple[Tensor, Tensor]:
    """Rows of the k nearest gallery images of some queries [Q, k], never the query itself, and their similarities."""
    gallery = torch.arange(len(x)) if images.gallery is None else images.gallery.nonzero().flatten()
    points = project(x, space).cpu()
    s = pairwise(points[queries], points[gallery], space)
    s = s.masked_fill(queries[:, None] == gallery, -torch.inf)
    top = s.topk(min(k, len(gallery) - 1), dim=1)
    return gallery[top.indices], top.values


def neighbour_sheet(embedded: Embedded, path: Path, *, queries: int = 8, k: int = 8, seed: int = 0) -> Path:
    """Draw some queries, chosen by the seed, with their k nearest neighbours into a PNG file."""
    x, images, model = embedded
    asked = torch.arange(len(x)) if images.query is None else images.query.nonzero().flatten()
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(seed))
    chosen = asked[order[:queries]]
    rows, s = nearest_rows(x, images, chosen, k, model.embedder.space)
    pictures: list[Picture | None] = []
    captions: list[str] = []
    frames: list[str | None] = []
    for query, found, values in zip(chosen.tolist(), rows.tolist(), s.tolist(), strict=True):
        own = images.labels[query]
        pictures += [images.sources[query], None, *(images.sources[row] for row in found)]
        captions += ["query", "", *(f"{value:.2f}" for value in values)]
        frames += [None, None, *(RIGHT if images.labels[row] == own else WRONG for row in found)]
    labels = [images.names[int(images.labels[query])] for query in chosen]
    title = f"{model.plan.data}: queries of unseen classes and their nearest neighbours"
    sheet = contact_sheet(
        pictures, captions=captions, frames=frames, row_labels=labels, title=title, columns=rows.shape[1] + 2
    )
    sheet.save(path)
    return path
