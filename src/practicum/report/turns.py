"""The turns of conversations: agreement by turn, errors after a wrong turn, and a few in full.

Tool calls are folded, and text that the model did not write is grey.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from practicum.report.markup import (
    Section,
    escape_text,
    format_number,
    format_percent,
    render_details,
    render_note,
    render_panels,
    render_table,
)
from practicum.report.run_data import Row, RunData
from practicum.statistics import compare_turns, judge_turns
from practicum.statistics.turn_statistics import TurnAgreement
from practicum.types import CallRecord, Turn

MAX_TURNS = 16
"""The turns that the table has rows for."""

SHOWN = 3
"""The conversations that are shown in full: the newest of the student's."""

MAX_CHARACTERS = 2000
"""The characters of a turn that are shown."""


@dataclass(frozen=True, slots=True)
class JudgedConversation:
    """A recorded conversation of the student: its row, its turns, and how the teacher sees them."""

    row: Row
    turns: Sequence[Turn]
    judged: Sequence[TurnAgreement]


def build_turns_section(run: RunData) -> Section | None:
    """Build the panels about turns; None if no rollout is a conversation of the student."""
    conversations = [
        _judge_row(row) for row in run.rollouts if row.get("turns") and row["source"] == "student"
    ]
    if not conversations:
        return None
    # The sample is spread over the run: its last rows are the newest, but not of one step.
    newest = sorted(conversations, key=lambda conversation: conversation.row["step"])[-SHOWN:]
    judged = [conversation.judged for conversation in conversations]
    body = render_panels(
        {
            "By turn": _render_table(judged),
            "After a wrong turn": _render_mistakes(judged),
        }
    )
    body += "<h3>The newest conversations</h3>" + "".join(map(_render_conversation, newest))
    about = "sampled training rollouts of the student"
    return Section("turns", "Turns", "What happens turn by turn", about, body)


def _judge_row(row: Row) -> JudgedConversation:
    turns = [
        Turn(
            turn["role"],
            turn["tokens"],
            turn["text"],
            tuple(CallRecord(call["tool"], call["outcome"]) for call in turn.get("calls", ())),
            turn.get("reward"),
        )
        for turn in row["turns"]
    ]
    unknown = [None] * len(row["tokens"])
    judged = judge_turns(
        turns, row.get("teacher_logprobs") or unknown, row.get("divergence") or unknown
    )
    return JudgedConversation(row, turns, judged)


def _render_table(conversations: Sequence[Sequence[TurnAgreement]]) -> str:
    longest = min(max(map(len, conversations)), MAX_TURNS)
    body = []
    for number in range(longest):
        reached = [turns[number] for turns in conversations if number < len(turns)]
        divergences = [turn.reverse_kl for turn in reached if turn.reverse_kl is not None]
        shares = [turn.agreement for turn in reached if turn.agreement is not None]
        body.append(
            [
                str(number + 1),
                format_percent(len(reached) / len(conversations)),
                format_number(sum(divergences) / len(divergences) if divergences else None),
                format_percent(sum(shares) / len(shares)) if shares else "",
                format_percent(sum(turn.is_wrong for turn in reached) / len(reached)),
            ]
        )
    head = ["turn", "reached", "divergence, nats", "agreement", "wrong"]
    note = render_note(
        "Agreement is the mean probability that the teacher gives to the student's tokens. A turn is "
        "wrong if the teacher would hardly have written one of its tokens, or if a call in it has no "
        "result."
    )
    return render_table(head, body, numbers=(1, 2, 3, 4), label="turns") + note


def _render_mistakes(conversations: Sequence[Sequence[TurnAgreement]]) -> str:
    numbers = compare_turns(conversations)
    if "wrong_after" not in numbers:
        return render_note("No turn follows a wrong one.")
    return render_note(
        f"After only right turns, {format_percent(numbers['wrong_before'])} of the turns are wrong; "
        f"after a wrong turn, {format_percent(numbers['wrong_after'])} are. The first wrong turn "
        f"is number {numbers['first_wrong_turn']:.1f} on average."
    )


def _render_conversation(conversation: JudgedConversation) -> str:
    """Render one conversation; the teacher's view is next to each of the student's turns."""
    views = iter(conversation.judged)
    parts = [
        _render_own_turn(turn, next(views))
        if turn.role == "assistant"
        else f'<p class="turn reply"><b>{escape_text(turn.role)}</b>{_shorten(turn.text)}</p>'
        for turn in conversation.turns
    ]
    row = conversation.row
    title = f"step {row['step']}, prompt {escape_text(row['prompt'])}: {row['stop_reason']}"
    return f'<div class="conversation"><h4>{title}</h4>{"".join(parts)}</div>'


def _render_own_turn(turn: Turn, view: TurnAgreement) -> str:
    words = [] if view.agreement is None else [f"agreement {format_percent(view.agreement)}"]
    words += [] if view.reverse_kl is None else [f"{view.reverse_kl:.2f} nats"]
    words += [] if turn.reward is None else [f"reward {format_number(turn.reward)}"]
    words += ["wrong"] if view.is_wrong else []
    beside = f"<small>{', '.join(words)}</small>"
    text = _shorten(turn.text)
    if turn.calls:
        calls = ", ".join(f"{escape_text(call.tool) or '?'}: {call.outcome}" for call in turn.calls)
        text = render_details(f"calls {calls}", text)
    return f'<div class="turn own"><b>student</b>{text}{beside}</div>'


def _shorten(text: str) -> str:
    cut = text[:MAX_CHARACTERS]
    return f"<code>{escape_text(cut, lines=True)}{'…' if len(text) > MAX_CHARACTERS else ''}</code>"
