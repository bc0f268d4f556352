"""The gate: check values from third-party code before any other code uses them.

Environments, tools, rewards, feedback, scorers and notes may be user code, and most of them return
text that a model wrote. Each value is checked for its type, finite numbers, valid Unicode and size.
A wrong value is replaced or refused, and counted by its kind; it never ends the run.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsFloat, TypeVar, get_args

import torch

from practicum.core.abandon import Cancelled
from practicum.errors import DataError, PracticumError, VerifierError
from practicum.foreign import describe_error, is_foreign
from practicum.pictures import IMAGE, load_picture
from practicum.ports import (
    Observation,
    Task,
)
from practicum.text import excerpt
from practicum.types import (
    CallOutcome,
    CallRecord,
    Judgement,
    Message,
    Metrics,
    Prompt,
    Rollout,
    StopReason,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

Kind = Literal["type", "number", "unicode", "size", "time", "error"]
"""The fault of a foreign value: its type, a number that is not finite or far too large, half
of a surrogate pair, too much text, a deadline that passed, or an exception in place of a value."""

LONGEST_TEXT = 1 << 20
"""The most characters of one foreign text; the text after them is cut off."""

LARGEST_NUMBER = 1e15
"""The largest absolute foreign number; its square is still finite in float32."""


@dataclass(frozen=True, slots=True)
class RejectedValue:
    """A foreign value that was replaced or refused, and why."""

    kind: Kind
    reason: str


class Refused(Exception):
    """A value of an environment that cannot be replaced: it ends its conversation."""

    def __init__(self, kind: Kind, reason: str) -> None:
        self.kind: Kind = kind
        super().__init__(reason)


_collected: ContextVar[list[RejectedValue] | None] = ContextVar("rejections", default=None)


@contextmanager
def collect_rejections() -> Iterator[list[RejectedValue]]:
    """Collect the rejections of the block and of the threads that copy its context.

    A nested block passes its rejections to the outer block when it ends.
    """
    outer, rejections = _collected.get(), list[RejectedValue]()
    token = _collected.set(rejections)
    try:
        yield rejections
    finally:
        _collected.reset(token)
        if outer is not None:
            outer += rejections


@contextmanager
def report_rejections() -> Iterator[list[RejectedValue]]:
    """Collect rejections, and log one warning with their number and the first of them."""
    with collect_rejections() as rejections:
        yield rejections
    if rejections:
        counts = Counter(rejection.kind for rejection in rejections)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in get_args(Kind) if counts[kind])
        log.warning(
            "values of environments, tools or functions were rejected (%s), the first: %s",
            kinds,
            rejections[0].reason,
        )


def reject(kind: Kind, reason: str) -> None:
    """Count a rejection in the innermost block that collects them, if there is one."""
    rejections = _collected.get()
    if rejections is not None:
        rejections.append(RejectedValue(kind, excerpt(reason)))


def list_kinds(rejections: Iterable[RejectedValue]) -> tuple[Kind, ...]:
    """Return the kind of each rejection."""
    return tuple(rejection.kind for rejection in rejections)


def classify_error(error: BaseException) -> Kind:
    """Return the kind of a foreign call that ended with an exception."""
    if isinstance(error, Refused):
        return error.kind
    return "time" if isinstance(error, TimeoutError) else "error"


def call_foreign(name: str, call: Callable[[], T]) -> T | None:
    """Return the result of foreign code; None, and a rejection, if it raises.

    Errors that are meant for the user, cancellations and a lack of memory on the device pass.
    """
    try:
        return call()
    except (PracticumError, Cancelled, torch.OutOfMemoryError):
        raise
    # Foreign code may raise anything, and may leave with sys.exit().
    except (Exception, SystemExit) as error:
        reject(classify_error(error), f"{name}: {describe_error(error)}")
        return None


def call_part(part: object, label: str, call: Callable[[], T]) -> T:
    """Return the result of a part of a recipe; DataError, in one line, if a foreign part raises."""
    if not is_foreign(part):
        return call()
    try:
        return call()
    except (PracticumError, Cancelled, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{label}: {describe_error(error)}") from error


def repair_text(text: str) -> str:
    """Replace each half of a surrogate pair in a text by U+FFFD.

    JSON and Python can hold such halves; tokenizers and files cannot.
    """
    if text.isascii():
        return text
    # Two adjacent halves are one character in UTF-16.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def accept_text(text: Any, name: str) -> str | None:
    """Return a foreign text, repaired and cut to `LONGEST_TEXT`; None if it is not a text."""
    if not isinstance(text, str):
        reject("type", f"{name} is a {type(text).__name__}, not a text")
        return None
    if len(text) > LONGEST_TEXT:
        reject("size", f"{name} has {len(text)} characters, more than {LONGEST_TEXT}")
        text = text[:LONGEST_TEXT]
    repaired = repair_text(text)
    if repaired != text:
        reject("unicode", f"{name} holds half of a surrogate pair")
    return repaired


def accept_number(answer: Any, name: str) -> float | None:
    """Return a foreign number as a float; None if it is not a number, not finite or far too large."""
    try:
        # A check against a protocol takes a hundred times as long as a check of the type.
        is_number = type(answer) is float or isinstance(answer, SupportsFloat)
        number = float(answer) if is_number else None
    except OverflowError:
        number = math.inf
    # A tensor of several entries, or an object of any kind.
    except Exception:
        number = None
    if number is None:
        reject("type", f"{name} is a {type(answer).__name__}, which is no number")
    elif not abs(number) <= LARGEST_NUMBER:
        reject("number", f"{name} is {number:g}")
        return None
    return number


def ask_reward(task: Task, rollout: Rollout) -> Rollout:
    """Return the rollout with the task's reward, which is None if it is not a finite number."""
    with collect_rejections() as rejections:
        value = call_foreign("reward()", lambda: task.reward(rollout))
        reward = None if value is None else accept_number(value, "reward()")
    return replace(rollout, reward=reward, rejected=(*rollout.rejected, *list_kinds(rejections)))


def ask_feedback(task: Task, rollout: Rollout) -> str | None:
    """Return the task's feedback on an answer; None if there is no feedback or it is not text."""
    text = call_foreign("feedback()", lambda: task.feedback(rollout))
    return None if text is None else accept_text(text, "feedback()")


def count_answers(task: Task, rollout: Rollout) -> int | None:
    """Return how often an answer is stated; None if the task requires no format or returns None."""
    count = call_foreign("count_answers()", lambda: task.count_answers(rollout))
    if count is None or (type(count) is int and 0 <= count <= LARGEST_NUMBER):
        return count
    reject("type", f"count_answers() is {count!r:.80}, which is no count")
    return None


def check_prompts(prompts: Any) -> Sequence[Prompt]:
    """Return a task's prompts; DataError with the first one that cannot be shown to a model."""
    if not isinstance(prompts, Sequence):
        raise DataError(
            f"the task's prompts: it returned a {type(prompts).__name__}; return a list"
        )
    for number, prompt in enumerate(prompts, start=1):
        problem = _find_prompt_problem(prompt)
        if problem:
            raise DataError(f"the task's prompt {number} {problem}")
    return prompts


def _find_prompt_problem(prompt: Any) -> str:
    if not isinstance(prompt, Prompt) or not isinstance(prompt.id, str):
        return f"is a {type(prompt).__name__}; return a Prompt with an id of text"
    where = f"({excerpt(prompt.id)!r}) has"
    if not isinstance(prompt.messages, tuple) or not prompt.messages:
        return f"{where} no message; write messages=(Message('user', ...),)"
    for message in prompt.messages:
        is_message = isinstance(message, Message)
        texts = (message.role, message.content, message.reasoning or "") if is_message else (None,)
        if not all(map(_is_valid, texts)):
            return f"{where} a message that is no text, or holds half of a surrogate pair"
    if not all(text is None or _is_valid(text) for text in (prompt.answer, prompt.response)):
        return f"{where} an answer or response that is no text, or holds half of a surrogate pair"
    return ""


def _is_valid(text: Any) -> bool:
    return isinstance(text, str) and repair_text(text) == text


def count_valid_steps(task: Task, prompt: Prompt, steps: Sequence[str]) -> int | None:
    """Return the number of leading valid steps; 0 if the task's count is not a valid count.

    None if the task checks no steps.
    """
    name = "count_valid_steps()"
    with collect_rejections() as rejections:
        count = call_foreign(name, lambda: task.count_valid_steps(prompt, steps))
        if count is not None and not (type(count) is int and 0 <= count <= len(steps)):
            reject("type", f"{name} is {count!r:.80}, which is no count of {len(steps)} steps")
    for rejection in rejections:
        reject(rejection.kind, rejection.reason)
    return 0 if rejections else count


def ask_expert(
    task: Task, prompt: Prompt, turns: Sequence[str], start: str | None = None
) -> Mapping[str, float]:
    """Return the expert's distribution over the next turn, or over turns that begin with `start`.

    Raises VerifierError if it is not a distribution: no other value can replace the expert's.
    """
    where = f"the task's expert(), turn {len(turns) + 1} of prompt {excerpt(prompt.id)!r}"
    with collect_rejections() as rejections:
        choices = call_foreign(
            where,
            lambda: (
                task.expert(prompt, turns) if start is None else task.redirect(prompt, turns, start)
            ),
        )
        if isinstance(choices, Mapping) and choices:
            for text, probability in choices.items():
                accept_text(text, f"{where}: a choice")
                accept_number(probability, f"{where}: a probability")
        elif not rejections:
            reject("type", f"{where} is {choices!r:.80}, which is no distribution")
    if rejections:
        raise VerifierError(
            f"{rejections[0].reason}; return the probability of each full text of the next turn"
        )
    assert choices is not None
    return choices


def accept_observation(answer: Any, vocabulary: int) -> Observation:
    """Return an environment's observation with valid texts, numbers and records.

    `vocabulary` is the number of token ids. Raises Refused if its next turn cannot be used.
    """
    if not isinstance(answer, Observation):
        raise Refused(
            "type",
            f"step() returned a {type(answer).__name__}; return a practicum.ports.Observation",
        )
    if not isinstance(answer.more, tuple | list) or not isinstance(answer.tokens, tuple | list):
        raise Refused("type", "Observation.more and Observation.tokens are tuples")
    first, *more = (_accept_message(message) for message in (answer.message, *answer.more))
    if not all(type(token) is int and 0 <= token < vocabulary for token in answer.tokens):
        raise Refused("type", f"Observation.tokens holds no token id from 0 to {vocabulary - 1}")
    warning = accept_text(answer.warning, "Observation.warning") or ""
    if not (first.content if first else "").startswith(warning):
        reject("type", f"Observation.warning is {warning!r:.80}, which does not begin the message")
        warning = ""
    stop_reason = answer.stop_reason
    if stop_reason not in get_args(StopReason):
        reject("type", f"Observation.stop_reason is {stop_reason!r:.80}")
        stop_reason = "stop"
    reward = answer.reward
    return Observation(
        first,
        notes=_accept_notes(answer.notes),
        more=tuple(message for message in more if message is not None),
        reward=None if reward is None else accept_number(reward, "Observation.reward"),
        calls=_accept_calls(answer.calls),
        stop_reason=stop_reason,
        tokens=tuple(answer.tokens),
        warning=warning,
    )


def _accept_message(message: Any) -> Message | None:
    """Return an environment's message, repaired; raise Refused if it cannot be shown to a model."""
    if message is None:
        return None
    if not isinstance(message, Message):
        raise Refused("type", f"a message is a {type(message).__name__}; write a Message")
    content = accept_text(message.content, "Message.content")
    role = accept_text(message.role, "Message.role")
    if content is None or role is None:
        raise Refused("type", "Message.content and Message.role are texts")
    if role == "assistant":
        raise Refused(
            "type", "step() spoke in the role assistant, which is the student's; write user or tool"
        )
    name = None if message.name is None else accept_text(message.name, "Message.name")
    return Message(role, content, name, images=_accept_images(message, content))


def _accept_images(message: Message, content: str) -> tuple[str, ...]:
    """Return a message's pictures; raise Refused if one cannot be read, or has no place in the text."""
    images = tuple(message.images)
    if images and (message.role != "user" or content.count(IMAGE) != len(images)):
        raise Refused(
            "type",
            f"Message.images has {len(images)} pictures; write {IMAGE} for each in a user's turn",
        )
    for image in images:
        if not isinstance(image, str):
            raise Refused("type", f"a picture is a {type(image).__name__}, not a text")
        try:
            load_picture(image)
        except DataError as error:
            raise Refused("type", f"Message.images: {error}") from error
    return images


def _accept_notes(notes: Any) -> dict[str, str]:
    if not isinstance(notes, Mapping):
        reject("type", f"Observation.notes is a {type(notes).__name__}, not a mapping")
        return {}
    texts = {
        accept_text(key, "a name in Observation.notes"): accept_text(
            text, f"Observation.notes[{key!r:.80}]"
        )
        for key, text in notes.items()
    }
    return {key: text for key, text in texts.items() if key is not None and text is not None}


def _accept_calls(calls: Any) -> tuple[CallRecord, ...]:
    records = list(calls) if isinstance(calls, tuple | list) else [calls]
    good = tuple(
        CallRecord(repair_text(record.tool), record.outcome)
        for record in records
        if isinstance(record, CallRecord)
        and isinstance(record.tool, str)
        and record.outcome in get_args(CallOutcome)
    )
    if len(good) < len(records):
        reject("type", "Observation.calls holds what is no CallRecord")
    return good


def accept_judgement(answer: Any, name: str) -> Judgement:
    """Return a scorer's judgement of a rollout, undecided where it is not finite.

    `Judgement.rejected` has the kinds of its faults.
    """
    with collect_rejections() as rejections:
        number, tokens = None, None
        if not isinstance(answer, Judgement):
            reject("type", f"{name} is a {type(answer).__name__}, not a Judgement")
        else:
            number = None if answer.value is None else accept_number(answer.value, name)
            tokens = answer.tokens
            if tokens is not None and not isinstance(tokens, torch.Tensor):
                reject("type", f"{name}: its tokens are a {type(tokens).__name__}, not a tensor")
                tokens = None
            elif tokens is not None and not (tokens.abs() <= LARGEST_NUMBER).all():
                reject("number", f"{name}: the number of a token is not finite")
                tokens = None
    if isinstance(answer, Judgement) and not rejections:
        return replace(answer, value=number)
    # If one part of a judgement is wrong, its other part is not trusted either.
    return Judgement(None, rejected=list_kinds(rejections))


def accept_metrics(answer: Any, name: str) -> Metrics:
    """Return a scorer's metrics that are finite numbers or NaN; omit all other entries."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        reject("type", f"{name} is a {type(answer).__name__}, not a mapping of numbers")
        return {}
    good = {
        key: float(number)
        for key, number in answer.items()
        if isinstance(key, str) and isinstance(number, int | float)
    }
    if len(good) < len(answer):
        reject("type", f"{name} holds what is no number")
    return good


def measure_rejections(
    rollouts: Sequence[Rollout], rejections: Iterable[RejectedValue] = ()
) -> Metrics:
    """Count the step's rejections by kind: of its rollouts, their judgements, and `rejections`.

    A kind without a rejection has no metric.
    """
    counts = Counter(kind for rollout in rollouts for kind in rollout.rejected)
    counts += Counter(
        kind
        for rollout in rollouts
        for judgement in rollout.judgements.values()
        for kind in judgement.rejected
    )
    counts += Counter(list_kinds(rejections))
    return {f"rejected_{kind}": float(counts[kind]) for kind in get_args(Kind) if counts[kind]}
