"""Retrieval pages: queries and their nearest gallery images."""

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    best_rank,
    cosines,
    count_matches,
    rank_gallery,
)
from fedfr_jax.tasks.reid.evaluator import EvaluationSet, ReidEvaluator
from fedfr_jax.types import Evaluation, Evaluator, TrainedModels

NUM_SHOWN = 10  # gallery images beside a query
RIGHT, WRONG, PLAIN = (0, 140, 60), (205, 30, 30), (120, 120, 120)  # of frames
PAPER, INK = (255, 255, 255), (30, 30, 30)
FRAME, GAP, LINE = 4, 10, 15  # pixels: of a frame, between cells, of a line of text
LEAST_HEIGHT, LEAST_WIDTH = 128, 64  # to which smaller pictures are enlarged; a column


class Cell(NamedTuple):
    """An image of the page."""

    image: np.ndarray  # uint8 [H, W, 3]
    color: tuple[int, int, int]  # of its frame
    lines: tuple[str, ...]  # below it


def retrieval_sheets(
    evaluator: ReidEvaluator, images: EvaluationSet, names: tuple[str, ...], count: int
):
    """Build the evaluator that draws `count` queries of every domain at the end.

    The queries are spread evenly over those with a match. They are looked for by the
    one network, or where there is none by that of the first client who trains on the
    domain.

    Args:
      images: what `evaluator` was made of.
      names: of the identities.
    """

    def evaluate(networks: TrainedModels) -> Evaluation:
        pages = {}
        for domain in images.tests:
            apply, variables = networks.apply, networks.variables
            if variables is None:
                apply = networks.client_apply
                variables = networks.client_variables(_client_of(images, domain))
            features = evaluator.features(apply, variables, domain)
            people = evaluator.people(domain)
            rows = results(*features, *people, count=count)
            pages[domain] = draw_page(
                [result_cells(row, images, domain, names) for row in rows]
            )
        return Evaluation(images=pages)

    return Evaluator(evaluate, during_training=False)


def _client_of(images, domain):
    """First client with a domain; client 0 if there is none."""
    return next(
        (k for k, domains in enumerate(images.client_tests) if domain in domains), 0
    )


class Result(NamedTuple):
    """Retrieval result of one query."""

    query: int  # row of the queries
    nearest: np.ndarray  # [n] rows of the gallery, best first, without junk
    is_right: np.ndarray  # [n] bool
    first_hit: int  # images ahead of the first match


def results(
    queries: np.ndarray,
    gallery: np.ndarray,
    people: IdentityLabels,
    gallery_people: IdentityLabels,
    *,
    count: int,
) -> list[Result]:
    """Nearest gallery images of `count` queries, by features [Q, D] and [G, D]."""
    valid = np.flatnonzero(count_matches(people, gallery_people)[0])
    chosen = valid[np.unique(np.linspace(0, len(valid) - 1, count).astype(int))]
    of_chosen = IdentityLabels(people.identities[chosen], people.cameras[chosen])
    scores = cosines(queries[chosen], gallery)
    hits = rank_gallery(scores, of_chosen, gallery_people).first_hit
    retrieved = []
    for place, query in enumerate(chosen):
        query_label = IdentityLabels(
            *(values[place : place + 1] for values in of_chosen)
        )
        score = np.asarray(scores(np.array([place])))[0]
        nearest = best_rank(score, query_label, gallery_people, NUM_SHOWN)
        is_right = gallery_people.identities[nearest] == query_label.identities
        retrieved.append(Result(int(query), nearest, is_right, int(hits[place])))
    return retrieved


def result_cells(
    result: Result, images: EvaluationSet, domain: str, names: tuple[str, ...]
) -> list[Cell]:
    """Row of the page: the query and its nearest images."""
    queries, gallery = images.tests[domain]
    rows = np.array([queries[result.query], *gallery[result.nearest]])
    pixels = images.table.take(rows).images
    who = [names[label].rpartition("/")[2] for label in images.people.identities[rows]]
    lines = [
        (name, f"camera {camera}")
        for name, camera in zip(who, images.people.cameras[rows], strict=True)
    ]
    lines[0] += (f"first match: {result.first_hit + 1}",)
    colors = [PLAIN, *(RIGHT if is_right else WRONG for is_right in result.is_right)]
    return [Cell(*cell) for cell in zip(pixels, colors, lines, strict=True)]


def draw_page(rows: list[list[Cell]]) -> np.ndarray:
    """Draw rows of cells on white, uint8 [height, width, 3]; the query set apart."""
    sides = rows[0][0].image.shape[:2]
    scale = max(1, -(-LEAST_HEIGHT // sides[0]))
    height, width = (scale * side for side in sides)
    across = max(width, LEAST_WIDTH) + 2 * FRAME + GAP
    down = height + 2 * FRAME + 3 * LINE + GAP
    top, left = LINE + 2 * GAP, across + 3 * GAP
    num_columns = max(len(row) for row in rows) - 1
    size = (left + num_columns * across, top + len(rows) * down)
    paper = Image.new("RGB", size, PAPER)
    _write(paper, GAP, GAP, "query")
    _write(paper, left, GAP, "most alike, junk left out: green = right, red = wrong")
    for i, (query, *nearest) in enumerate(rows):
        _draw(paper, query, GAP, top + i * down, (width, height))
        for j, cell in enumerate(nearest):
            _draw(paper, cell, left + j * across, top + i * down, (width, height))
    return np.asarray(paper)


def _draw(paper: Image.Image, cell: Cell, x: int, y: int, size: tuple[int, int]):
    """Draw an image of `size` (width, height) with its frame and caption lines."""
    width, height = (side + 2 * FRAME for side in size)
    paper.paste(cell.color, (x, y, x + width, y + height))
    picture = Image.fromarray(np.ascontiguousarray(cell.image)).resize(size)
    paper.paste(picture, (x + FRAME, y + FRAME))
    for number, line in enumerate(cell.lines):
        _write(paper, x, y + height + 2 + number * LINE, line)


def _write(paper: Image.Image, x: int, y: int, text: str):
    ImageDraw.Draw(paper).text((x, y), text, INK, ImageFont.load_default(12))
