"""Do the two models speak the same language: tokens, ends of answers, templates, and the same numbers from every engine."""

import json
import math

import torch
from torch import Tensor

from practicum.models.config import ModelConfig
from practicum.ports import walk
from practicum.recipe import Recipe
from practicum.runs.assembly import ScorerInfo
from practicum.statistics import Interval, cluster_bootstrap, group_pairs, probability_errors
from practicum.studies.doctor.evidence import Evidence, RolloutMeasurement
from practicum.studies.doctor.findings import (
    CheckOutcome,
    Status,
    find_worst_status,
    format_interval,
    grade,
    override_terms,
    skipped,
)
from practicum.text import make_printable

STOP_GAP, IMPOSSIBLE_STOP = -3.0, 1e-4
SPECIAL_SHARE = (0.05, 0.20)
TEMPLATE_GAIN = 0.1
FEWEST_ENDS = 4
PARITY = (1.02, 1.05)
SUPERVISED = (
    "teacher={type: none}",
    "objective={signal: text, divergence: ce}",
    "rollout.source=dataset",
)
"""Learning from given answers, which needs no teacher's tokens."""


def refused_vocabulary(reason: str) -> CheckOutcome:
    """P1 where the models could not even be put together."""
    return CheckOutcome(
        "fail",
        f"{reason}. Or let the other model write its answers to a file and learn from those",
        fix=SUPERVISED,
    )


def vocabulary(evidence: Evidence) -> CheckOutcome:
    """P1: the token strings of student and teacher are compared id by id when the models are loaded."""
    tokens = evidence.built.learner.renderer.vocab_size
    details = {"answers that their text gives back token by token": _round_trips(evidence)}
    if not evidence.scorers:
        return CheckOutcome(
            "pass",
            f"the teacher reads with the student's own tokenizer ({tokens} tokens)",
            details=details,
        )
    return CheckOutcome(
        "pass",
        f"student and teacher have the same {tokens} tokens under the same ids",
        details=details,
    )


def stop_event(evidence: Evidence) -> CheckOutcome:
    """P2: where the student stops, would the teacher stop too, and with a token at which the student stops?"""
    if evidence.silent:
        return skipped(evidence.silent)
    student, teacher = evidence.built.learner.renderer.stop_ids, evidence.teacher_stops
    merge = _stop_fix(evidence)
    ends = [trace for trace in evidence.traces if _stopped(trace)]
    tokens = f"the student stops at {_names(evidence, student)}, the teacher at {_names(evidence, teacher)}"
    if not ends:
        text = f"none of the {len(evidence.traces)} answers ended, so nothing is known of how the teacher likes its end"
        if student & teacher:
            return CheckOutcome("inconclusive", text, needs=4 * len(evidence.traces))
        return CheckOutcome("warn", f"{text}; {tokens}", fix=merge)
    own = _median(
        [trace.teacher_logprobs[-1].item() for trace in ends if trace.teacher_logprobs is not None]
    )
    if any(trace.teacher_stop is None for trace in ends):
        status: Status = "pass" if own > math.log(IMPOSSIBLE_STOP) else "fail"
        text = f"the teacher gives the student's stop token a median probability of {math.exp(own):.2g}"
        text += "" if status == "pass" else ": the student would learn never to stop"
        return CheckOutcome(status, text, fix=merge)
    event = _median(
        [trace.teacher_stop[-1].item() for trace in ends if trace.teacher_stop is not None]
    )
    gap = evidence.mean(_stop_gap)
    details = {
        "median probability of the stop token": math.exp(own),
        "of any stop token": math.exp(event),
    }
    if own < math.log(IMPOSSIBLE_STOP) and not teacher <= student:
        text = (
            f"{tokens}; where the student stops, its token has a median probability of {math.exp(own):.2g} for the teacher, so "
            "the student would learn never to stop"
        )
        return CheckOutcome("fail", text, gap, "nats", merge, details=details)
    if event < math.log(IMPOSSIBLE_STOP):
        text = (
            f"where the student stops, the teacher gives all stop tokens together a median probability of {math.exp(event):.2g}: "
            "it would go on"
        )
        return CheckOutcome("fail", text, gap, "nats", details=details)
    if own < math.log(IMPOSSIBLE_STOP):
        return CheckOutcome(
            "warn",
            f"{tokens}, at which the student stops too: as one event they agree",
            gap,
            "nats",
        )
    assert gap is not None, "some rollout ended"
    if len(ends) < FEWEST_ENDS:
        text = f"only {len(ends)} of {len(evidence.traces)} answers ended, too few to know how the teacher likes an end"
        needs = math.ceil(len(evidence.traces) * FEWEST_ENDS / len(ends))
        return CheckOutcome("inconclusive", text, gap, "nats", needs=needs, details=details)
    close = gap.mean >= STOP_GAP
    text = (
        "the teacher stops where the student does"
        if close
        else "the teacher would often go on where the student stops"
    )
    return CheckOutcome("pass" if close else "warn", text, gap, "nats", details=details)


def template(evidence: Evidence) -> CheckOutcome:
    """P3: do both read prompts alike, and how much of the disagreement is about special tokens?"""
    status, sentence, fix = _templates(evidence)
    excess = _special_excess(evidence)
    if excess is None:
        if status == "pass" and evidence.silent:
            return skipped(evidence.silent)
        return CheckOutcome(status, sentence, fix=fix)
    of_tokens = grade(excess, *SPECIAL_SHARE)
    if of_tokens != "pass":
        sentence += "; special tokens carry more of the disagreement than their number explains"
        if not fix and all(term.weights.name == "all" for term in evidence.recipe.objective.losses):
            fix = override_terms(evidence.recipe, "weights=not_special")
    return CheckOutcome(
        find_worst_status(status, of_tokens),
        sentence,
        excess,
        "of the KL, beyond their share of tokens",
        fix,
    )


def parity(evidence: Evidence) -> CheckOutcome:
    """P4: are log-probabilities the same when a text is written and when it is scored, for the student and the teacher?"""
    if evidence.trouble:
        return CheckOutcome(
            "fail", f"the teacher could not score the student's answers: {evidence.trouble}"
        )
    student = evidence.mean(lambda trace: _errors(trace.logprobs, trace.rollout.policy_logprobs))
    if student is None:
        return skipped("no answer has a token")
    by_prompt = group_pairs(
        (canary.prompt, _errors(canary.scored, canary.written)) for canary in evidence.canaries
    )
    teacher = (
        cluster_bootstrap([torch.cat(group) for group in by_prompt.values()], evidence.seed)
        if by_prompt
        else None
    )
    found = {"the student's": student, **({} if teacher is None else {"the teacher's": teacher})}
    graded: dict[str, Status] = {whose: grade(value, *PARITY) for whose, value in found.items()}
    status = find_worst_status(*graded.values())
    whose = next(name for name, of_one in graded.items() if of_one == status)
    details = {f"of {name} texts": value.mean for name, value in found.items()}
    if status == "pass":
        return CheckOutcome(
            status, "writing and scoring give the same probabilities", student, "x", details=details
        )
    text = (
        f"{whose} log-probabilities differ between writing and scoring by a factor of {format_interval(found[whose])} a token: "
        "a temperature, a shift by one token, or other weights in one of the engines"
    )
    return CheckOutcome(
        status, text, found[whose], "x", ("student.dtype=float32",), details=details
    )


def model_places(recipe: Recipe) -> list[str]:
    """Where the recipe describes the models behind its teacher, as override keys, in the order in which they are loaded."""
    return [
        ".".join(("teacher", *keys))
        for keys, inside in walk(recipe.teacher)
        if isinstance(inside, ModelConfig)
    ]


def _round_trips(evidence: Evidence) -> float | None:
    """The share of answers whose text, read again, has the same tokens; the others must never travel as text."""
    tokenizer = evidence.built.learner.renderer.tokenizer
    answers = [rollout.tokens.tolist() for rollout in evidence.rollouts if len(rollout.tokens)]
    same = [
        tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids for ids in answers
    ]
    return sum(same) / len(same) if same else None


def _stopped(trace: RolloutMeasurement) -> bool:
    return trace.rollout.stop_reason == "stop" and trace.teacher_logprobs is not None


def _stop_gap(trace: RolloutMeasurement) -> Tensor | None:
    if not _stopped(trace) or trace.teacher_stop is None:
        return None
    return (trace.teacher_stop - trace.student_stop)[-1:]


def _stop_fix(evidence: Evidence) -> tuple[str, ...]:
    """Let the student stop at the teacher's tokens too."""
    tokenizer = evidence.built.learner.renderer.tokenizer
    more = sorted(evidence.teacher_stops - evidence.built.learner.renderer.stop_ids)
    if not more:
        return ()
    names = [*evidence.recipe.student.stop, *map(str, tokenizer.convert_ids_to_tokens(more))]
    return (f"student.stop={json.dumps(names)}",)


def _names(evidence: Evidence, ids: frozenset[int]) -> str:
    tokens = evidence.built.learner.renderer.tokenizer.convert_ids_to_tokens(sorted(ids))
    return " or ".join(make_printable(str(token)) for token in tokens)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _errors(scored: Tensor, written: Tensor) -> Tensor:
    """exp |difference| of log-probabilities at each token, the terms of NeMo-RL's multiplicative probability error."""
    known = ~written.isnan()
    return probability_errors(scored[known], written[known])


def _special_excess(evidence: Evidence) -> Interval | None:
    """The share of the whole divergence that lies on special tokens, minus their share of the tokens."""
    special = torch.tensor(sorted(evidence.built.learner.renderer.special_ids), dtype=torch.long)
    total = evidence.mean(lambda trace: trace.divergence)
    if total is None or total.mean <= 1e-9:
        return None

    def excess(trace: RolloutMeasurement) -> Tensor | None:
        if trace.divergence is None:
            return None
        return (trace.divergence / total.mean - 1.0) * torch.isin(trace.rollout.tokens, special)

    return evidence.mean(excess)


def _templates(evidence: Evidence) -> tuple[Status, str, tuple[str, ...]]:
    """How the prompts are written on both sides."""
    recipe, renderer = evidence.recipe, evidence.built.learner.renderer
    own = renderer.tokenizer.chat_template
    if recipe.student.template is not None and own is not None and recipe.student.template != own:
        return (
            "warn",
            "the recipe writes the student's prompts with another template than the model's own, which it was trained with",
            ("student.template=null",),
        )
    for place, scorer in zip(model_places(recipe), evidence.scorers, strict=False):
        found = _compared(evidence, place, scorer)
        if found is not None:
            return found
    alike = "student and teacher write prompts with the same template"
    return (
        "pass",
        alike if evidence.scorers else "the teacher writes prompts with the student's template",
        (),
    )


def _compared(
    evidence: Evidence, place: str, scorer: ScorerInfo
) -> tuple[Status, str, tuple[str, ...]] | None:
    """What is to be said where one model behind the teacher writes prompts another way."""
    mine, theirs = evidence.built.learner.renderer, scorer.renderer
    messages = evidence.prompts[0].messages
    texts = [
        renderer.tokenizer.decode(list(renderer.render(messages))) for renderer in (mine, theirs)
    ]
    if texts[0] == texts[1] and mine.thinking == theirs.thinking:
        return None
    if mine.thinking != theirs.thinking or ("<think>" in texts[0]) != ("<think>" in texts[1]):
        thinking = json.dumps(mine.thinking)
        text = "one of the two models writes its thoughts and the other does not, by the template's thinking switch"
        return "warn", text, (f"{place}.thinking={thinking}",)
    text = "student and teacher write prompts with different templates, each with its own"
    if theirs.template is not None:
        return (
            "warn",
            f"{text}; the recipe gives the teacher another one than the model's",
            (f"{place}.template=null",),
        )
    if mine.system != theirs.system:
        return "warn", f"{text} system turn", (f"{place}.system={json.dumps(mine.system)}",)
    gain = _gain_of_students_template(evidence)
    if gain is None or gain.low <= TEMPLATE_GAIN:
        return (
            "warn",
            f"{text}, and the teacher finds the answers no likelier after the student's",
            (),
        )
    better = f"{text}; after the student's the teacher finds its answers likelier by {format_interval(gain)} nats a token"
    chosen = mine.template or mine.tokenizer.chat_template
    return "warn", better, (f"{place}.template={json.dumps(chosen)}",)


def _gain_of_students_template(evidence: Evidence) -> Interval | None:
    if evidence.other_template is None:
        return None
    others = {
        id(trace): other
        for trace, other in zip(evidence.traces, evidence.other_template, strict=True)
    }
    return evidence.mean(
        lambda trace: (
            None if trace.teacher_logprobs is None else others[id(trace)] - trace.teacher_logprobs
        )
    )
