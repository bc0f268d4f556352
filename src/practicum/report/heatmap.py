"""The heat map: completions token by token, coloured by the scores of student and teacher.

Colours come in steps with fixed edges, so that two pages can be compared. The scale runs from pale
to dark in one hue, and from blue to brown for a quantity with a sign, two colours that
colour-blind readers can distinguish.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from practicum.report.markup import Section, escape_text, format_number, render_pictures
from practicum.report.run_data import Row, RunData, find_pictures
from practicum.text import make_printable

MAX_TOKENS = 240
"""The number of tokens of a completion that are shown."""

ROLLOUTS_PER_PART = 3
"""The number of training rollouts of the beginning, of the middle and of the end."""

NATS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""The edges between the eight colours of a quantity in nats."""

SIGNED = (-4.0, -2.0, -1.0, -0.25, 0.25, 1.0, 2.0, 4.0)
"""The edges between the nine colours of a log-ratio."""

SIGNED_CLASSES = ("s7", "s5", "s3", "s1", "s0", "b1", "b2", "b3", "b4")
CLASSES = tuple(f"s{index}" for index in range(8))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a token that can colour it."""

    key: str
    name: str
    about: str
    edges: tuple[float, ...] = NATS
    classes: tuple[str, ...] = CLASSES


def _list_quantities(largest_weight: float) -> list[Quantity]:
    weights = tuple(largest_weight * share for share in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95))
    return [
        Quantity(
            "divergence",
            "divergence",
            "reverse KL to the teacher, nats; in training rollouts the divergence of the loss",
        ),
        Quantity("student_entropy", "student entropy", "nats"),
        Quantity("teacher_entropy", "teacher entropy", "nats"),
        Quantity(
            "gap",
            "log-prob gap",
            "log p(teacher) - log p(student): the teacher finds warm tokens less likely and blue tokens more likely",
            SIGNED,
            SIGNED_CLASSES,
        ),
        Quantity(
            "weight", "weight", "the token's coefficient in the loss, of the largest shown", weights
        ),
    ]


@dataclass(frozen=True, slots=True)
class View:
    """A completion to look at: a heading of HTML, its tokens, and their numbers by name.

    `title` names the completion in plain text. `sides` holds the most likely tokens of student and
    teacher, if they were traced. `hidden_tokens` counts the tokens that are cut off, and `pictures`
    are the files of the pictures in the text.
    """

    title: str
    heading: str
    text: Sequence[str]
    control: Sequence[bool]
    numbers: Mapping[str, Sequence[float | None]]
    sides: Mapping[str, Row]
    hidden_tokens: int = 0
    pictures: Sequence[Path] = ()


def build_heatmap_section(run: RunData) -> tuple[Section | None, dict[str, Any]]:
    """Build the heat map, and its numbers for a reader who points at a token."""
    pairs = _build_pairs(run)
    rollouts = _build_rollout_views(run)
    views = [view for pair in pairs for view in pair] + rollouts
    quantities = _choose_quantities(views)
    if not quantities:
        return None, {}
    default = quantities[0]
    indices = iter(range(len(views)))
    held_out = "".join(
        f'<div class="pair">{"".join(_render_view(view, next(indices), default) for view in pair)}'
        "</div>"
        for pair in pairs
    )
    training = "".join(_render_view(view, next(indices), default) for view in rollouts)
    maps = ""
    if held_out:
        maps += f"<h3>held-out answers, before and after</h3>{held_out}"
    if training:
        maps += (
            "<h3>training rollouts, from the first step to the last</h3>"
            f'<div class="pair">{training}</div>'
        )
    scales = "".join(
        _render_scale(quantity, is_hidden=quantity is not default) for quantity in quantities
    )
    body = (
        f'<div class="controls" hidden>{_render_choices(quantities)}</div>{scales}'
        f'<div class="heat"><div class="maps">{maps}</div>'
        '<aside class="detail" aria-live="polite" aria-label="the token you chose"></aside></div>'
        '<noscript><p class="note">With JavaScript each token answers to the pointer and the arrow '
        "keys.</p></noscript>"
    )
    about = (
        "each token coloured; point at one, click it or walk with the arrow keys to see what the "
        "teacher preferred"
    )
    page_data = {
        "quantities": [
            {name: value for name, value in asdict(quantity).items() if name != "about"}
            for quantity in quantities
        ],
        "views": [_collect_data(view) for view in views],
    }
    return Section("heat", "Tokens", "Token by token", about, body), page_data


def _choose_quantities(views: Sequence[View]) -> list[Quantity]:
    """Return the quantities that some token of the views has."""
    columns: dict[str, list[float]] = {}
    for view in views:
        for key, column in view.numbers.items():
            columns.setdefault(key, []).extend(value for value in column if value is not None)
    largest_weight = max(columns.get("weight", ()), default=0.0) or 1.0
    return [quantity for quantity in _list_quantities(largest_weight) if columns.get(quantity.key)]


def _build_pairs(run: RunData) -> list[list[View]]:
    """Return the traced held-out completions of each prompt, before and, if there is one, after."""
    before = {trace["prompt"]: trace for trace in (run.before or {}).get("traces", ())}
    after = {trace["prompt"]: trace for trace in (run.after or {}).get("traces", ())}
    answers = (run.before or run.after or {}).get("answers", ())
    by_prompt = {answer["prompt"]: answer for answer in answers}
    pairs = []
    for prompt in before or after:
        traces = (("before", before.get(prompt)), ("after", after.get(prompt)))
        pairs.append(
            [
                _build_trace_view(when, trace, by_prompt.get(prompt, {}), run)
                for when, trace in traces
                if trace is not None
            ]
        )
    return pairs


def _build_trace_view(when: str, trace: Row, answer: Row, run: RunData) -> View:
    numbers = {
        "divergence": trace["reverse_kl"],
        "student_entropy": trace["student_entropy"],
        "teacher_entropy": trace["teacher_entropy"],
        "gap": _subtract(trace["teacher_logprobs"], trace["logprobs"]),
        "logprob": trace["logprobs"],
        "teacher_logprob": trace["teacher_logprobs"],
    }
    question = escape_text(trace["question"])
    return View(
        f"{when}: {make_printable(trace['question'])}",
        f'<span class="when {when}">{when}</span> {question}'
        f"{_render_reward(trace['reward'], answer.get('expected'))}",
        trace["text"][:MAX_TOKENS],
        trace["control"][:MAX_TOKENS],
        {name: column[:MAX_TOKENS] for name, column in numbers.items()},
        {name: trace[name] for name in ("student", "teacher") if trace[name] is not None},
        max(len(trace["text"]) - MAX_TOKENS, 0),
        find_pictures(answer.get("pictures", ()), run),
    )


def _render_reward(reward: float | None, expected: str | None = None) -> str:
    """Render if an answer is right or wrong, or its reward, and the expected answer if known."""
    if reward is None:
        return ""
    if reward == 1.0:
        return ' <span class="right">right</span>'
    hint = "" if expected is None else f", expected {escape_text(expected)}"
    # A graded task gives part of a reward, or more than 1: a number, and not a mistake.
    if reward != 0.0:
        return f' <span class="graded">reward {format_number(reward)}{hint}</span>'
    return f' <span class="wrong">wrong{hint}</span>'


def _build_rollout_views(run: RunData) -> list[View]:
    """Return a few training rollouts of the beginning, the middle and the end."""
    # Rollouts hold token ids only: without the vocabulary there is no text to colour.
    if not run.vocabulary:
        return []
    rows = [row for row in run.rollouts if any(row["loss_mask"])]
    count, total = ROLLOUTS_PER_PART, len(rows)
    middle = max((total - count) // 2, 0)
    indices = {*range(count), *range(middle, middle + count), *range(total - count, total)}
    return [_build_rollout_view(rows[i], run) for i in sorted(indices) if 0 <= i < total]


def _build_rollout_view(row: Row, run: RunData) -> View:
    tokens = [
        run.vocabulary.get(token, (f"<{token}>", True)) for token in row["tokens"][:MAX_TOKENS]
    ]
    unknown = [None] * len(row["tokens"])
    numbers: dict[str, Sequence[float | None]] = {
        "divergence": row["divergence"],
        "student_entropy": row.get("student_entropy") or unknown,
        "teacher_entropy": row.get("teacher_entropy") or unknown,
        "gap": _subtract(row["teacher_logprobs"], row["policy_logprobs"]),
        "weight": row.get("weight") or unknown,
        "logprob": row["policy_logprobs"],
        "teacher_logprob": row["teacher_logprobs"],
    }
    source = "" if row["source"] == "student" else f" by the {escape_text(row['source'])}"
    reward = _render_reward(row.get("reward"))
    return View(
        f"step {row['step']}: {make_printable(row['prompt'])}",
        f'<span class="when">step {row["step"]}</span> {escape_text(row["prompt"])}{source}{reward}',
        [text for text, _ in tokens],
        [control for _, control in tokens],
        {name: column[:MAX_TOKENS] for name, column in numbers.items()},
        {},
        max(len(row["tokens"]) - MAX_TOKENS, 0),
        find_pictures((*row["prompt_tokens"], *row["tokens"]), run),
    )


def _subtract(
    teacher: Sequence[float | None], student: Sequence[float | None]
) -> list[float | None]:
    """Return teacher minus student for each token, or None if one of the two is not known."""
    return [
        None if high is None or low is None else high - low
        for high, low in zip(teacher, student, strict=True)
    ]


def _render_view(view: View, index: int, quantity: Quantity) -> str:
    """Render a completion as text, its tokens coloured by a quantity."""
    # Tokens carry no id: the script finds the numbers of a token by its position in the text.
    column = view.numbers.get(quantity.key, ())
    tokens = ""
    for position, (text, control) in enumerate(zip(view.text, view.control, strict=True)):
        value = column[position] if position < len(column) else None
        tokens += _render_token(text, choose_colour(value, quantity), is_control=control)
    if view.hidden_tokens:
        tokens += f'<span class="note"> and {view.hidden_tokens} tokens more</span>'
    return (
        f'<article class="map"><h4>{view.heading}</h4>{render_pictures(view.pictures)}'
        f'<p class="tokens" data-view="{index}">{tokens}</p></article>'
    )


def _render_token(text: str, colour: str, *, is_control: bool) -> str:
    printable = html.escape(make_printable(text) or "∅")
    if is_control:
        return f'<i class="{colour} control">{printable}</i>'
    # The line break itself is shown as a sign; the text breaks where the model broke it.
    return f'<i class="{colour}">{printable}</i>{"<br>" if text.endswith(chr(10)) else ""}'


def choose_colour(value: float | None, quantity: Quantity) -> str:
    """Return the class of a value's colour, or `none` if the value is not known."""
    if value is None:
        return "none"
    return quantity.classes[sum(value >= edge for edge in quantity.edges)]


def _render_choices(quantities: Sequence[Quantity]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="quantity" value="{quantity.key}"'
        f"{' checked' if index == 0 else ''}><span>{quantity.name}</span></label>"
        for index, quantity in enumerate(quantities)
    )
    return f'<fieldset class="choices"><legend>colour by</legend>{buttons}</fieldset>'


def _render_scale(quantity: Quantity, *, is_hidden: bool) -> str:
    """Render the colours of a quantity with the values between them."""
    edges = [*(f"{edge:.2g}" for edge in quantity.edges), ""]
    steps = "".join(
        f'<i class="{kind}"></i><span>{edge}</span>'
        for kind, edge in zip(quantity.classes, edges, strict=True)
    )
    about = f'<span class="note">{html.escape(quantity.about)}</span>'
    hidden = " hidden" if is_hidden else ""
    return f'<p class="scale" data-quantity="{quantity.key}"{hidden}>{steps}{about}</p>'


def _collect_data(view: View) -> dict[str, Any]:
    """Return a view's text and numbers for the page's script, rounded to four digits."""
    count = len(view.text)
    return {
        "title": view.title,
        "text": [make_printable(text) for text in view.text],
        "numbers": {name: _round_all(column) for name, column in view.numbers.items()},
        "sides": {
            name: {
                "texts": [list(map(make_printable, row)) for row in side["texts"][:count]],
                "shares": [_round_all(row) for row in side["probabilities"][:count]],
            }
            for name, side in view.sides.items()
        },
    }


def _round_all(column: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in column]
