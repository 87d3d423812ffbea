"""Questions to the index, several at a time: pictures become embeddings together, alike searches are one search."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.index import Hit, Index
from nearkin.model import Model
from nearkin.serve.limits import Refused

Floats = NDArray[np.float32]


class Question(NamedTuple):
    """A search by a picture's pixels, uint8 [C, size, size], or by an item of the index."""

    k: int
    labels: tuple[str, ...] | None = None
    pixels: Tensor | None = None
    id: str | None = None


class Searcher:
    """Answers questions; one thread at a time."""

    def __init__(self, index: Index, model: Model | None) -> None:
        self.index, self.model = index, model

    def answer(self, questions: list[Question]) -> list[list[Hit] | Exception]:
        """The hits of each question, or what was wrong with it."""
        answers: list[list[Hit] | Exception] = [Refused(404, "There is no such picture in the index.")] * len(questions)
        alike: dict[tuple[int, tuple[str, ...] | None, str | None], list[int]] = defaultdict(list)
        vectors = self._vectors(questions)
        for row in vectors:
            alike[(questions[row].k, questions[row].labels, questions[row].id)].append(row)
        for (k, labels, item), rows in alike.items():
            exclude = None if item is None else [item]
            points = np.stack([vectors[row] for row in rows])
            try:
                found: Sequence[list[Hit] | Exception] = self.index.search(points, k, labels=labels, exclude=exclude)
            except NearkinError as error:
                found = [error] * len(rows)
            for row, hits in zip(rows, found, strict=True):
                answers[row] = hits
        return answers

    def _vectors(self, questions: list[Question]) -> dict[int, Floats]:
        """The embeddings of the questions that have one, by row."""
        found: dict[int, Floats] = {}
        pictures = {row: q.pixels for row, q in enumerate(questions) if q.pixels is not None}
        if pictures and self.model is not None:
            embedded = self.model.embed(torch.stack(list(pictures.values()))).cpu().numpy()
            found.update(zip(pictures, embedded, strict=True))
        for row, question in enumerate(questions):
            if question.id is not None:
                try:
                    found[row] = self.index.embeddings([question.id])[0]
                except NearkinError:  # it is not, or no longer, in the index
                    continue
        return found
