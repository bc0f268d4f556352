"""Run every arm as `runs` does, then compare what each flow draws with its teacher.

The readings of a run:

- `energy_distance`: 2 E|x - y| - E|x - x'| - E|y - y'| between the student's end points x and end
  points y of exact trajectories from other noises; 0 for equal distributions.
- `energy_share`: its ratio to the distance before training.
- `exact_distance`: the distance of the exact trajectories from the held-out noises: the sampling error.

Each run folder also gets `drawn.svg`, with the end points of teacher and student.
"""

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.errors import RecipeError
from practicum.methods.pi_flow.mixture import SIDE, MixtureTask, read_end_point
from practicum.run_dir import read_json, write_json
from practicum.runs import open_run
from practicum.runs.opening import build_task
from practicum.types import FrozenConfig

WIDTH, MARGIN = 240, 20
"""The width of a panel and its margin."""

COLOURS = ("#2f6fde", "#e8590c")


class Config(FrozenConfig):
    """No settings."""

    type: Literal["flow"] = "flow"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms and draw with their students."""
    return measure_with(measure_drawing, job)


def measure_drawing(folder: Path) -> dict[str, float]:
    """Return the readings of a finished run; they are measured once."""
    path = folder / "flow.json"
    if not path.is_file():
        write_json(path, _measure_drawing(folder))
    return read_json(path)


def _measure_drawing(folder: Path) -> dict[str, float]:
    task = build_task(open_run(folder)[1])
    if not isinstance(task, MixtureTask):
        raise RecipeError("measure flow: flows draw from noise; set task: {type: mixture}")
    references = torch.stack([task.end_points[prompt.id] for prompt in task.train_prompts()[:1024]])
    before, after = (
        _read_end_points(folder / f"{when}.json", references.shape[1])
        for when in ("before", "after")
    )
    exact = torch.stack([task.end_points[name] for name in after])
    students = torch.stack([*after.values()])
    (folder / "drawn.svg").write_text(draw({"teacher": exact, "student": students}))
    distance = compute_energy_distance(students, references)
    start = compute_energy_distance(torch.stack([*before.values()]), references)
    return {
        "energy_distance": distance,
        "energy_share": distance / start,
        "exact_distance": compute_energy_distance(exact, references),
    }


def _read_end_points(path: Path, dimension: int) -> dict[str, Float[Tensor, " D"]]:
    """Return the end points of an evaluation by prompt."""
    ends = {
        answer["prompt"]: read_end_point(answer["text"], dimension)
        for answer in read_json(path)["student"]["answers"]
    }
    return {name: end for name, end in ends.items() if end is not None}


def compute_energy_distance(first: Float[Tensor, "N D"], second: Float[Tensor, "M D"]) -> float:
    """Return the energy distance of two samples, without bias (Szekely & Rizzo 2013)."""
    inner = [
        torch.cdist(points, points).sum() / (len(points) * (len(points) - 1))
        for points in (first, second)
    ]
    return (2 * torch.cdist(first, second).mean() - sum(inner)).item()


def draw(points: dict[str, Float[Tensor, "N D"]]) -> str:
    """Return an SVG with a panel for each model: points in two dimensions, or pictures."""
    parts = []
    for number, (name, ends) in enumerate(points.items()):
        x_start = MARGIN + number * (WIDTH + MARGIN)
        parts.append(f'<text x="{x_start}" y="14">{name}</text>')
        is_flat = ends.shape[1] == 2
        parts += (
            _draw_points(ends, x_start, COLOURS[number]) if is_flat else _draw_grid(ends, x_start)
        )
    size = len(points) * (WIDTH + MARGIN) + MARGIN, WIDTH + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img">'
        f"<style>text{{font:11px system-ui,sans-serif}}</style>{''.join(parts)}</svg>\n"
    )


def _draw_points(ends: Float[Tensor, "N 2"], x_start: int, colour: str) -> list[str]:
    places = (ends.clamp(-3, 3) / 6 + 0.5) * WIDTH
    return [
        f'<circle cx="{x_start + x:.1f}" cy="{MARGIN + y:.1f}" r="1.8" fill="{colour}" opacity=".6"/>'
        for x, y in places.tolist()
    ]


def _draw_grid(ends: Float[Tensor, "N 64"], x_start: int) -> list[str]:
    """Return the first 25 pictures as grey squares."""
    rows, cell = 5, WIDTH / 5 / (SIDE + 1)
    squares = []
    for number, picture in enumerate(ends[: rows**2].clamp(-1, 1)):
        x0 = x_start + number % rows * WIDTH / rows
        y0 = MARGIN + number // rows * WIDTH / rows
        for place, value in enumerate(picture.tolist()):
            grey = round(127.5 - 127.5 * value)
            x, y = x0 + place % SIDE * cell, y0 + place // SIDE * cell
            squares.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}" '
                f'fill="#{grey:02x}{grey:02x}{grey:02x}"/>'
            )
    return squares
