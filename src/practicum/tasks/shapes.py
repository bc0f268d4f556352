"""Questions about coloured squares and discs on a small canvas: count them, find the left one, or add two counts."""

import io
import json
import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import DataError, suggest_install
from practicum.grading.verifiers import compare_exactly, contains
from practicum.pictures import IMAGE, encode_bytes
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.pictures import TEACHER_IMAGES
from practicum.types import Message, Prompt

CELLS, PIXELS = 4, 8
"""The cells of the canvas on each side, and their pixels: each cell may have one shape."""

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
FORMS = ("square", "disc")
MOST = 3
"""The largest number of shapes."""

Shape = tuple[str, str, int]
"""A colour, a form, and the number of a cell, row by row."""


Shown = Literal["picture", "caption", "blank", "either"]


class Config(TaskConfig):
    """The numbers of questions, and what replaces the picture.

    Each question has the privileged fields `caption`, which lists the shapes in words, and `teacher_images`,
    the picture of another question.
    """

    type: Literal["shapes"] = "shapes"
    shows: Shown = Field(
        default="picture",
        description="what a question shows: its picture, the caption in its place, an empty canvas, or `either`: "
        "half of the questions show the picture, and the others the caption",
    )
    heldout_shows: Shown | None = Field(
        default=None, description="what a held-out question shows; none: as `shows`"
    )
    asks: Literal["one", "sum"] = Field(
        default="one",
        description="a count or the left shape, or the sum of two counts: `add red blue?` is answered by "
        "`2 red, 1 blue so 3`",
    )
    train_size: int = Field(default=512, ge=1, description="questions to train on")
    heldout_size: int = Field(default=64, ge=0, description="other questions, to evaluate on")


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct pictures with a question about each, the held-out ones first."""
    draw = random.Random(seed_of(context.seed, "shapes"))
    count = config.heldout_size + config.train_size
    scenes = dict[str, list[Shape]]()
    while len(scenes) < count:
        scene = _draw_scene(draw)
        scenes.setdefault(describe_scene(scene), scene)
    pictures = list(scenes.values())
    heldout = config.heldout_shows or config.shows
    prompts = [
        _build_prompt(
            config.asks,
            heldout if number < config.heldout_size else config.shows,
            scene,
            pictures[number - 1],
            draw,
        )
        for number, scene in enumerate(pictures)
    ]
    return PromptSet(
        train=prompts[config.heldout_size :],
        heldout=prompts[: config.heldout_size],
        verify=contains if config.asks == "sum" else compare_exactly,
    )


def describe_scene(scene: Sequence[Shape]) -> str:
    """Return the shapes in words, row by row, with their columns from 1: `red square 2, blue disc 1`."""
    return ", ".join(f"{colour} {form} {cell % CELLS + 1}" for colour, form, cell in scene)


def draw_canvas(scene: Sequence[Shape]) -> str:
    """Return the picture of a scene as a `data:` URL."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DataError(
            f"the task shapes draws pictures with the package pillow; {suggest_install('pictures')}"
        ) from error
    canvas = Image.new("RGB", (CELLS * PIXELS, CELLS * PIXELS), "white")
    pen = ImageDraw.Draw(canvas)
    for colour, form, cell in scene:
        x, y = cell % CELLS * PIXELS + 1, cell // CELLS * PIXELS + 1
        box = (x, y, x + PIXELS - 3, y + PIXELS - 3)
        (pen.rectangle if form == "square" else pen.ellipse)(box, fill=COLOURS[colour])
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return encode_bytes(file.getvalue())


def _draw_scene(draw: random.Random) -> list[Shape]:
    cells = sorted(draw.sample(range(CELLS * CELLS), draw.randint(1, MOST)))
    return [(draw.choice(list(COLOURS)), draw.choice(FORMS), cell) for cell in cells]


def _build_prompt(
    asks: str, shows: Shown, scene: Sequence[Shape], neighbour: Sequence[Shape], draw: random.Random
) -> Prompt:
    question, answer = _ask(scene, draw) if asks == "one" else _ask_sum(scene, draw)
    caption, picture = describe_scene(scene), draw_canvas(scene)
    if shows == "either":
        shows = draw.choice(["picture", "caption"])
    text, images = f"{IMAGE}{question}", (picture,)
    if shows == "caption":
        text, images = f"{caption}. {question}", ()
    elif shows == "blank":
        images = (draw_canvas([]),)
    return Prompt(
        f"{question} {caption}",
        (Message("user", text, images=images),),
        # The verifier looks for the end of a worked sum.
        answer=answer[answer.find("so") :] if asks == "sum" else answer,
        response=answer if asks == "sum" else None,
        domain=question.split()[0],
        privileged={
            "caption": caption,
            "question": question,
            TEACHER_IMAGES: json.dumps([draw_canvas(neighbour)]),
        },
    )


def _ask(scene: Sequence[Shape], draw: random.Random) -> tuple[str, str]:
    """Return a question about a scene, and its answer."""
    columns = [cell % CELLS for _, _, cell in scene]
    if columns.count(min(columns)) == 1 and draw.random() < 0.5:
        colour, form, _ = scene[columns.index(min(columns))]
        return "left?", f"{colour} {form}"
    kind = draw.choice([*COLOURS, *FORMS])
    return f"count {kind}?", _count(scene, kind)


def _ask_sum(scene: Sequence[Shape], draw: random.Random) -> tuple[str, str]:
    """Return a question about two counts, and the counts with their sum."""
    kinds = draw.sample(draw.choice([[*COLOURS], [*FORMS]]), 2)
    counts = [_count(scene, kind) for kind in kinds]
    total = sum(int(count.split()[0]) for count in counts)
    return f"add {' '.join(kinds)}?", f"{', '.join(counts)} so {total}"


def _count(scene: Sequence[Shape], kind: str) -> str:
    return f"{sum(kind in shape for shape in scene)} {kind}"
