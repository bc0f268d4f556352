"""The heat map: answers token by token, coloured by what student and teacher thought of them.

Colours come in steps with fixed edges, so that two pages can be compared; the scale runs from pale to dark in one hue,
and from blue to brown where a quantity has a sign, which colour-blind readers tell apart.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.report.markup import Section, safe
from practicum.report.reading import Row, RunData
from practicum.text import make_printable

SHOWN_TOKENS = 240
"""So many tokens of a rollout are shown."""

PER_PART = 3
"""So many training rollouts of the beginning, the middle and the end."""

NATS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""The edges between the eight colours of a quantity in nats."""

SIGNED = (-4.0, -2.0, -1.0, -0.25, 0.25, 1.0, 2.0, 4.0)
"""The edges between the nine colours of a log-ratio."""

SIGNED_CLASSES = ("s7", "s5", "s3", "s1", "s0", "b1", "b2", "b3", "b4")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a token can be coloured by."""

    key: str
    name: str
    about: str
    edges: tuple[float, ...]
    classes: tuple[str, ...]


def _quantities(largest_weight: float) -> list[Quantity]:
    heat = tuple(f"s{place}" for place in range(8))
    weights = tuple(largest_weight * share for share in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95))
    return [
        Quantity(
            "divergence",
            "divergence",
            "reverse KL to the teacher, nats; in training rollouts the loss's",
            NATS,
            heat,
        ),
        Quantity("student_entropy", "student entropy", "nats", NATS, heat),
        Quantity("teacher_entropy", "teacher entropy", "nats", NATS, heat),
        Quantity(
            "gap",
            "log-prob gap",
            "log p(teacher) - log p(student): the teacher likes warm tokens less, blue ones more",
            SIGNED,
            SIGNED_CLASSES,
        ),
        Quantity(
            "weight",
            "weight",
            "the token's coefficient in the loss, of the largest shown",
            weights,
            heat,
        ),
    ]


@dataclass(frozen=True, slots=True)
class View:
    """One answer to look at: a heading of ready HTML, its tokens and their numbers by name.

    `title` says in plain text which answer it is. `sides` are what student and teacher would rather have written, or nothing.
    """

    title: str
    heading: str
    text: Sequence[str]
    control: Sequence[bool]
    numbers: Mapping[str, Sequence[float | None]]
    sides: Mapping[str, Row]
    cut: int = 0


def heatmap_section(run: RunData) -> tuple[Section | None, dict[str, Any]]:
    """The heat map, and its numbers for the reader who points at a token."""
    pairs = _pairs(run)
    rollouts = _rollout_views(run)
    views = [view for pair in pairs for view in pair] + rollouts
    if not views:
        return None, {}
    weights = [
        value for view in views for value in view.numbers.get("weight", ()) if value is not None
    ]
    known = {
        key
        for view in views
        for key, column in view.numbers.items()
        if any(value is not None for value in column)
    }
    quantities = [one for one in _quantities(max(weights, default=0.0) or 1.0) if one.key in known]
    if not quantities:
        return None, {}
    default = quantities[0]
    places = iter(range(len(views)))
    drawn_pairs = "".join(
        f'<div class="pair">{"".join(_drawn(view, next(places), default) for view in pair)}</div>'
        for pair in pairs
    )
    drawn_rollouts = "".join(_drawn(view, next(places), default) for view in rollouts)
    parts = [
        ("held-out answers, before and after", drawn_pairs),
        (
            "training rollouts, from the first step to the last",
            f'<div class="pair">{drawn_rollouts}</div>',
        ),
    ]
    maps = "".join(f"<h3>{title}</h3>{body}" for title, body in parts if "<article" in body)
    scales = "".join(_scale(one, hidden=place > 0) for place, one in enumerate(quantities))
    body = (
        f'<div class="controls" hidden>{_choices(quantities)}</div>{scales}'
        f'<div class="heat"><div class="maps">{maps}</div>'
        '<aside class="detail" aria-live="polite" aria-label="the token you chose"></aside></div>'
        '<noscript><p class="note">With JavaScript each token answers to the pointer and the arrow keys.</p></noscript>'
    )
    about = "each token coloured; point at one, click it or walk with the arrow keys to see what the teacher preferred"
    data = {
        "quantities": [
            {"key": one.key, "name": one.name, "edges": one.edges, "classes": one.classes}
            for one in quantities
        ],
        "views": [_data(view) for view in views],
    }
    return Section("heat", "Tokens", "Token by token", about, body), data


def _pairs(run: RunData) -> list[list[View]]:
    """The traced held-out answers: each prompt before and after, as far as there is an after."""
    before = {trace["prompt"]: trace for trace in (run.before or {}).get("traces", ())}
    after = {trace["prompt"]: trace for trace in (run.after or {}).get("traces", ())}
    pairs = []
    for prompt in before or after:
        columns = (("before", before.get(prompt)), ("after", after.get(prompt)))
        pairs.append([_trace_view(when, trace) for when, trace in columns if trace is not None])
    return pairs


def _trace_view(when: str, trace: Row) -> View:
    numbers = {
        "divergence": trace["reverse_kl"],
        "student_entropy": trace["student_entropy"],
        "teacher_entropy": trace["teacher_entropy"],
        "gap": _gap(trace["logprobs"], trace["teacher_logprobs"]),
        "logprob": trace["logprobs"],
        "teacher_logprob": trace["teacher_logprobs"],
    }
    sides = {name: trace[name] for name in ("student", "teacher") if trace[name] is not None}
    heading = (
        f'<span class="when {when}">{when}</span> {safe(trace["question"])}{_mark(trace["reward"])}'
    )
    kept = slice(0, SHOWN_TOKENS)
    return View(
        f"{when}: {make_printable(trace['question'])}",
        heading,
        trace["text"][kept],
        trace["control"][kept],
        {name: column[kept] for name, column in numbers.items()},
        sides,
        max(len(trace["text"]) - SHOWN_TOKENS, 0),
    )


def _mark(reward: float | None) -> str:
    if reward is None:
        return ""
    return (
        ' <span class="right">right</span>'
        if reward >= 1.0
        else ' <span class="wrong">wrong</span>'
    )


def _rollout_views(run: RunData) -> list[View]:
    """A few training rollouts of the beginning, the middle and the end."""
    if not run.vocabulary:
        return []
    rows = [row for row in run.rollouts if any(row["loss_mask"])]
    middle = max((len(rows) - PER_PART) // 2, 0)
    places = {
        *range(PER_PART),
        *range(middle, middle + PER_PART),
        *range(len(rows) - PER_PART, len(rows)),
    }
    return [_rollout_view(rows[place], run) for place in sorted(places) if 0 <= place < len(rows)]


def _rollout_view(row: Row, run: RunData) -> View:
    known = [
        run.vocabulary.get(token, (f"<{token}>", True)) for token in row["tokens"][:SHOWN_TOKENS]
    ]
    nothing = [None] * len(row["tokens"])
    numbers: dict[str, Sequence[float | None]] = {
        "divergence": row["divergence"],
        "student_entropy": row.get("student_entropy") or nothing,
        "teacher_entropy": row.get("teacher_entropy") or nothing,
        "gap": _gap(row["policy_logprobs"], row["teacher_logprobs"]),
        "weight": row.get("weight") or nothing,
        "logprob": row["policy_logprobs"],
        "teacher_logprob": row["teacher_logprobs"],
    }
    source = "" if row["source"] == "student" else f" by the {safe(row['source'])}"
    heading = f'<span class="when">step {row["step"]}</span> {safe(row["prompt"])}{source}{_mark(row.get("reward"))}'
    return View(
        f"step {row['step']}: {make_printable(row['prompt'])}",
        heading,
        [text for text, _ in known],
        [control for _, control in known],
        {name: column[:SHOWN_TOKENS] for name, column in numbers.items()},
        {},
        max(len(row["tokens"]) - SHOWN_TOKENS, 0),
    )


def _gap(own: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    """Return how much higher the teacher's log-probabilities are; None where one of the two is not known."""
    return [
        None if mine is None or theirs is None else theirs - mine
        for mine, theirs in zip(own, other, strict=True)
    ]


def _drawn(view: View, place: int, quantity: Quantity) -> str:
    """An answer as text, its tokens coloured by the first quantity; they are told apart by their order alone."""
    column = view.numbers.get(quantity.key, ())
    pieces = "".join(
        _token(text, control, colour(column[number] if number < len(column) else None, quantity))
        for number, (text, control) in enumerate(zip(view.text, view.control, strict=True))
    )
    rest = f'<span class="note"> and {view.cut} tokens more</span>' if view.cut else ""
    return f'<article class="map"><h4>{view.heading}</h4><p class="tokens" data-view="{place}">{pieces}{rest}</p></article>'


def _token(text: str, control: bool, kind: str) -> str:
    shown = html.escape(make_printable(text) or "∅")
    if control:
        return f'<i class="{kind} control">{shown}</i>'
    return f'<i class="{kind}">{shown}</i>{"<br>" if text.endswith(chr(10)) else ""}'


def colour(value: float | None, quantity: Quantity) -> str:
    """The class of a value's colour; `none` where it is not known."""
    if value is None:
        return "none"
    return quantity.classes[sum(value >= edge for edge in quantity.edges)]


def _choices(quantities: Sequence[Quantity]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="quantity" value="{one.key}"{" checked" if place == 0 else ""}>'
        f"<span>{one.name}</span></label>"
        for place, one in enumerate(quantities)
    )
    return f'<fieldset class="choices"><legend>colour by</legend>{buttons}</fieldset>'


def _scale(quantity: Quantity, hidden: bool) -> str:
    """The colours of a quantity with the values between them."""
    edges = [*(f"{edge:.2g}" for edge in quantity.edges), ""]
    steps = "".join(
        f'<i class="{kind}"></i><span>{edge}</span>'
        for kind, edge in zip(quantity.classes, edges, strict=True)
    )
    about = f'<span class="note">{html.escape(quantity.about)}</span>'
    return f'<p class="scale" data-quantity="{quantity.key}"{" hidden" if hidden else ""}>{steps}{about}</p>'


def _data(view: View) -> dict[str, Any]:
    """The numbers of a view, short."""
    return {
        "title": view.title,
        "text": [make_printable(text) for text in view.text],
        "numbers": {
            name: [_short(value) for value in column] for name, column in view.numbers.items()
        },
        "sides": {
            name: {
                "texts": [
                    [make_printable(text) for text in row]
                    for row in side["texts"][: len(view.text)]
                ],
                "shares": [
                    [_short(value) for value in row]
                    for row in side["probabilities"][: len(view.text)]
                ],
            }
            for name, side in view.sides.items()
        },
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
