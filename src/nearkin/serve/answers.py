"""The JSON the server gives, as types: OpenAPI shows them as they stand here."""

from typing import Literal

from pydantic import BaseModel, Field


class Label(BaseModel):
    """A class of the index."""

    name: str
    items: int = Field(description="How many items have it.")


class Threshold(BaseModel):
    """The similarity from which two pictures are taken for one class."""

    similarity: float
    precision: float | None = Field(None, description="The part of such pairs that were kin at calibration; 0 … 1.")


class About(BaseModel):
    """What the index is."""

    name: str
    items: int
    dim: int
    space: str = Field(description="The geometry: cosine, ball, euclidean or inner.")
    kind: str = Field(description="How it searches: exact, hnsw or ivfpq.")
    labels: list[Label] = Field(description="The classes, sorted by name.")
    threshold: Threshold | None
    by_picture: bool = Field(description="Whether pictures can be searched by; else only items can.")
    by_picture_why: str | None = Field(description="Where they cannot: why, in a sentence.")
    upload_bytes: int = Field(description="Bytes that a picture may have.")
    upload_pixels: int = Field(description="Pixels that a picture may have.")
    most_hits: int = Field(description="Hits that a search may ask for.")
    version: str


class Item(BaseModel):
    """One picture of the index."""

    id: str
    path: str
    label: str | None


class Hit(Item):
    """A picture that was found."""

    similarity: float
    same: bool | None = Field(description="Whether it is taken for the same class; null where there is no threshold.")


class Found(BaseModel):
    """The nearest pictures, the nearest first."""

    query: Item | None = Field(description="The item that was searched by; null for a picture of one's own.")
    hits: list[Hit]


class Examples(BaseModel):
    """Pictures to begin with, of as many classes as may be."""

    items: list[Item]


class Map(BaseModel):
    """The index in the plane, column by column."""

    state: Literal["drawing", "done", "none"] = Field(description="Whether a better map is on its way.")
    method: str
    total: int = Field(description="Items in the index; a large one is shown in part.")
    labels: list[str]
    ids: list[str]
    label: list[int] = Field(description="For each point the number of its label, -1 for none.")
    x: list[float]
    y: list[float]


class Problem(BaseModel):
    """Why there is no answer, in a sentence."""

    error: str
