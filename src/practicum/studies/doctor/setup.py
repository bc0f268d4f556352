"""The checks of the setup: vocabulary, stop tokens, prompt templates, engine parity."""

import json
import math
from statistics import median_high

import torch
from torch import Tensor

from practicum.models.config import ModelConfig
from practicum.ports import walk
from practicum.recipe import Recipe
from practicum.runs.check_outcome import CheckOutcome, Status, skip_check
from practicum.runs.scoring import ScorerInfo
from practicum.statistics import Interval, cluster_bootstrap, group_pairs, probability_errors
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import (
    find_worst_status,
    format_interval,
    grade,
    override_terms,
    validate_fix,
)
from practicum.studies.doctor.measurements import RolloutMeasurement
from practicum.studies.doctor.translation import judge_translation
from practicum.text import VocabularyMap, make_printable, map_vocabularies

MIN_STOP_GAP = -3.0
"""Lower limit of the teacher's log-probability of stopping minus the student's, in nats."""

MAX_OUTSIDE = 0.01
"""P1 warns above this mean probability of tokens that the second vocabulary lacks."""

MIN_STOP_PROBABILITY = 1e-4
MAX_SPECIAL_SHARE = 0.05
MIN_TEMPLATE_GAIN = 0.1
MIN_ENDED = 4
PARITY = (1.02, 1.05)
SUPERVISED = (
    "teacher={type: none}",
    "objective={signal: text, divergence: ce}",
    "rollout.source=dataset",
)
"""The overrides for training on given answers, which needs no shared vocabulary."""


def refuse_vocabulary(recipe: Recipe, reason: str) -> CheckOutcome:
    """Return the outcome of P1 for two models with contradicting vocabularies.

    The fix makes the teacher read the text with its own tokenizer. If the recipe does not allow
    that, the fix trains the student on given answers.
    """
    inner = recipe.teacher.model_dump(mode="json", exclude_unset=True)
    teacher = json.dumps({"type": "translated", "teacher": {"type": recipe.teacher.type, **inner}})
    fix = (f"teacher={teacher}", "objective={signal: sampled}")
    translated = validate_fix(recipe, CheckOutcome("fail", reason, fix=fix))
    return translated if translated.fix else CheckOutcome("fail", reason, fix=SUPERVISED)


def check_vocabulary(evidence: Evidence) -> CheckOutcome:
    """P1: Compare the token strings of student and teacher id by id when the models are loaded,
    and measure the probability of tokens that only one of them has."""
    tokens = evidence.renderer.vocab_size
    details = {
        "share of answers that re-tokenize to the same tokens": _measure_round_trips(evidence)
    }
    if evidence.translators:
        return judge_translation(evidence, evidence.translators, details)
    # Without a translation, a pair with contradicting vocabularies does not get this far: loading it
    # raises VocabularyError.
    maps = [
        map_vocabularies(evidence.renderer.tokenizer, scorer.renderer.tokenizer)
        for scorer in evidence.scorers
    ]
    differing = list(filter(None, maps))
    if differing:
        return _judge_outside(evidence, differing, details)
    text = (
        f"student and teacher have the same {tokens} tokens under the same ids"
        if evidence.scorers
        else f"the teacher reads with the student's own tokenizer ({tokens} tokens)"
    )
    return CheckOutcome("pass", text, details=details)


def _judge_outside(
    evidence: Evidence, vocabularies: list[VocabularyMap], details: dict[str, float | None]
) -> CheckOutcome:
    """Judge P1 for vocabularies that agree at their shared ids, by the mass on all other tokens."""
    student = evidence.estimate_mean(lambda row: row.student_outside)
    teacher = evidence.estimate_mean(lambda row: row.teacher_outside)
    text = "; ".join(dict.fromkeys(vocabulary.describe() for vocabulary in vocabularies))
    details = {
        **details,
        "tokens only the teacher has": float(max(len(v.teacher_names) for v in vocabularies)),
        "tokens only the student has": float(max(len(v.student_names) for v in vocabularies)),
    }
    if student is None or teacher is None:
        return CheckOutcome("pass", text, details=details)
    details |= {
        "student's mass on tokens only it has": student.mean,
        "teacher's mass on tokens only it has": teacher.mean,
    }
    largest = max(student, teacher, key=lambda interval: interval.mean)
    if largest.mean <= MAX_OUTSIDE:
        return CheckOutcome("pass", text, largest, details=details)
    sides = ("teacher", "student") if largest is teacher else ("student", "teacher")
    return CheckOutcome(
        "warn",
        f"{text}; the {sides[0]} gives {largest.mean:.2g} of its probability to tokens that the "
        f"{sides[1]} lacks: look whether its template begins an answer with one, such as <think>, and set "
        "thinking or template",
        largest,
        details=details,
    )


def check_stop_event(evidence: Evidence) -> CheckOutcome:
    """P2: Test if the teacher would stop where the student stops, and at a token that also ends the
    student's answer."""
    if evidence.no_signal_reason:
        return skip_check(evidence.no_signal_reason)
    student, teacher = evidence.renderer.stop_ids, evidence.teacher_stops
    fix = _suggest_teacher_stops(evidence)
    ended = [row for row in evidence.measurements if _has_scored_stop(row)]
    tokens = (
        f"the student stops at {_format_tokens(evidence, student)}, "
        f"the teacher at {_format_tokens(evidence, teacher)}"
    )
    if not ended:
        total = len(evidence.measurements)
        text = (
            f"no answer of {total} ended, "
            "so the teacher's probability of stopping cannot be measured"
        )
        if student & teacher:
            return CheckOutcome("inconclusive", text, rollouts_needed=4 * total)
        return CheckOutcome("warn", f"{text}; {tokens}", fix=fix)
    if any(row.teacher_stop is None for row in ended):
        # Only the sampled token is scored, so further stop tokens of the teacher cannot be counted.
        token = _compute_median([row.teacher_logprobs for row in ended])
        status: Status = "pass" if token > math.log(MIN_STOP_PROBABILITY) else "fail"
        text = (
            "the teacher gives the student's stop token a median probability of "
            f"{math.exp(token):.2g}"
        )
        text += "" if status == "pass" else ": the student would learn never to stop"
        return CheckOutcome(status, text, fix=fix)
    return _judge_stops(evidence, ended, tokens, fix)


def _judge_stops(
    evidence: Evidence, ended: list[RolloutMeasurement], tokens: str, fix: tuple[str, ...]
) -> CheckOutcome:
    """Judge P2 for a teacher that scores all stop tokens, on the rollouts that `ended`."""
    token = _compute_median([row.teacher_logprobs for row in ended])
    event = _compute_median([row.teacher_stop for row in ended])
    gap = evidence.estimate_mean(_compute_stop_gap)
    assert gap is not None, "some rollout ended"
    limit = math.log(MIN_STOP_PROBABILITY)
    details: dict[str, float | None] = {
        "median probability of the stop token": math.exp(token),
        "of any stop token": math.exp(event),
    }
    status: Status = "fail"
    needs = None
    if token < limit and not evidence.teacher_stops <= evidence.renderer.stop_ids:
        text = (
            f"{tokens}; where the student stops, its token has a median probability of "
            f"{math.exp(token):.2g} for the teacher, so the student would learn never to stop"
        )
        return CheckOutcome(status, text, gap, "nats", fix, details=details)
    if event < limit:
        text = (
            "where the student stops, the teacher gives all stop tokens together a median "
            f"probability of {math.exp(event):.2g}: it would continue"
        )
    elif token < limit:
        status, details = "warn", {}
        text = f"{tokens}, at which the student also stops: as one event they agree"
    elif len(ended) < MIN_ENDED:
        total = len(evidence.measurements)
        status, needs = "inconclusive", math.ceil(total * MIN_ENDED / len(ended))
        text = (
            f"only {len(ended)} of {total} answers ended, "
            "too few to measure the teacher's probability of stopping"
        )
    elif gap.mean >= MIN_STOP_GAP:
        status, text = "pass", "the teacher stops where the student does"
    else:
        status, text = "warn", "the teacher would often continue where the student stops"
    return CheckOutcome(status, text, gap, "nats", rollouts_needed=needs, details=details)


def check_template(evidence: Evidence) -> CheckOutcome:
    """P3: Compare the prompts that both models read, and how much of their KL lies on special
    tokens."""
    status, sentence, fix = _check_prompts(evidence)
    excess = _estimate_special_excess(evidence)
    if excess is None:
        if status == "pass" and evidence.no_signal_reason:
            return skip_check(evidence.no_signal_reason)
        return CheckOutcome(status, sentence, fix=fix)
    # A template that does harm fails P2, P6 or P10; alone it is no failure.
    token_status: Status = "pass" if excess.mean <= MAX_SPECIAL_SHARE else "warn"
    if token_status != "pass":
        sentence += "; special tokens carry more of the disagreement than their number explains"
        if not fix and all(term.weights.name == "all" for term in evidence.recipe.objective.losses):
            fix = override_terms(evidence.recipe, "weights=not_special")
    return CheckOutcome(
        find_worst_status(status, token_status),
        sentence,
        excess,
        "of the KL, beyond their share of tokens",
        fix,
    )


def check_parity(evidence: Evidence) -> CheckOutcome:
    """P4: Compare sampling log-probabilities with scoring log-probabilities, for the student and
    for the
    teacher."""
    if evidence.scoring_error:
        return CheckOutcome(
            "fail", f"the teacher could not score the student's answers: {evidence.scoring_error}"
        )
    student = evidence.estimate_mean(
        lambda row: _compute_errors(row.logprobs, row.rollout.policy_logprobs)
    )
    if student is None:
        return skip_check("no answer has a token")
    factors = {"the student's": student}
    by_prompt = group_pairs(
        (sample.prompt_id, _compute_errors(sample.scored, sample.sampled))
        for sample in evidence.parity_samples
    )
    if by_prompt:
        errors = [torch.cat(group) for group in by_prompt.values()]
        factors["the teacher's"] = cluster_bootstrap(errors, evidence.seed)
    statuses: dict[str, Status] = {
        whose: grade(factor, *PARITY) for whose, factor in factors.items()
    }
    status = find_worst_status(*statuses.values())
    details = {f"of {whose} texts": factor.mean for whose, factor in factors.items()}
    if status == "pass":
        text = "writing and scoring give the same probabilities"
        return CheckOutcome(status, text, student, "x", details=details)
    whose = next(name for name in statuses if statuses[name] == status)
    text = (
        f"{whose} log-probabilities differ between writing and scoring by a factor of "
        f"{format_interval(factors[whose])} a token: "
        "a temperature, a shift by one token, or other weights in one of the engines"
    )
    return CheckOutcome(
        status, text, factors[whose], "x", ("student.dtype=float32",), details=details
    )


def list_model_keys(recipe: Recipe) -> list[str]:
    """Return the override keys of the models behind the teacher, in loading order."""
    return [
        ".".join(("teacher", *keys))
        for keys, config in walk(recipe.teacher)
        if isinstance(config, ModelConfig)
    ]


def _measure_round_trips(evidence: Evidence) -> float | None:
    """Return the share of rollouts that decode to text and encode to the same tokens again.

    Only such rollouts may be sent to a teacher as text.
    """
    tokenizer = evidence.renderer.tokenizer
    answers = [rollout.tokens.tolist() for rollout in evidence.rollouts if len(rollout.tokens)]
    matches = [
        tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids for ids in answers
    ]
    return sum(matches) / len(matches) if matches else None


def _has_scored_stop(row: RolloutMeasurement) -> bool:
    return row.rollout.stop_reason == "stop" and row.teacher_logprobs is not None


def _compute_stop_gap(row: RolloutMeasurement) -> Tensor | None:
    """Return the teacher's minus the student's log-probability of stopping at the end, [1]."""
    if not _has_scored_stop(row) or row.teacher_stop is None:
        return None
    return (row.teacher_stop - row.student_stop)[-1:]


def _suggest_teacher_stops(evidence: Evidence) -> tuple[str, ...]:
    """Return the override that makes the student also stop at the teacher's stop tokens.

    None if it already does.
    """
    tokenizer = evidence.renderer.tokenizer
    # The student cannot stop at a token that it lacks.
    stops = evidence.teacher_stops & evidence.renderer.token_ids
    missing = sorted(stops - evidence.renderer.stop_ids)
    if not missing:
        return ()
    names = [*evidence.recipe.student.stop, *map(str, tokenizer.convert_ids_to_tokens(missing))]
    return (f"student.stop={json.dumps(names)}",)


def _format_tokens(evidence: Evidence, ids: frozenset[int]) -> str:
    tokens = evidence.renderer.tokenizer.convert_ids_to_tokens(sorted(ids))
    named = [
        f"<{number}>" if token is None else str(token)
        for token, number in zip(tokens, sorted(ids), strict=True)
    ]
    return " or ".join(map(make_printable, named))


def _compute_median(columns: list[Tensor | None]) -> float:
    """Return the median of the last value of each column; None is skipped."""
    return median_high(column[-1].item() for column in columns if column is not None)


def _compute_errors(scored: Tensor, sampled: Tensor) -> Tensor:
    """Return exp |scored - sampled| per token, [T], as in NeMo-RL's probability error."""
    is_known = ~sampled.isnan()
    return probability_errors(scored[is_known], sampled[is_known])


def _estimate_special_excess(evidence: Evidence) -> Interval | None:
    """Return the special tokens' share of the divergence minus their share of the tokens."""
    special = torch.tensor(sorted(evidence.renderer.special_ids), dtype=torch.long)
    total = evidence.estimate_mean(lambda row: row.divergence)
    if total is None or total.mean <= 1e-9:
        return None

    # The mean of (d / mean(d) - 1) over the special tokens is the difference of the two shares, and
    # as a mean over tokens it has a bootstrap interval. Short answers have many special tokens; the
    # difference does not grow with their number.
    def compute_excess(row: RolloutMeasurement) -> Tensor | None:
        if row.divergence is None:
            return None
        return (row.divergence / total.mean - 1.0) * torch.isin(row.rollout.tokens, special)

    return evidence.estimate_mean(compute_excess)


def _check_prompts(evidence: Evidence) -> tuple[Status, str, tuple[str, ...]]:
    """Return status, sentence and fix of the first difference between both prompts."""
    recipe, trained_template = evidence.recipe, evidence.renderer.tokenizer.chat_template
    template = recipe.student.template
    if template is not None and trained_template is not None and template != trained_template:
        return (
            "warn",
            "the recipe writes the student's prompts with another template than the model's own, "
            "which it was trained with",
            ("student.template=null",),
        )
    for key, scorer in zip(list_model_keys(recipe), evidence.scorers, strict=False):
        difference = _compare_prompts(evidence, key, scorer)
        if difference is not None:
            return "warn", *difference
    text = (
        "student and teacher write prompts with the same template"
        if evidence.scorers
        else "the teacher writes prompts with the student's template"
    )
    return "pass", text, ()


def _compare_prompts(
    evidence: Evidence, key: str, scorer: ScorerInfo
) -> tuple[str, tuple[str, ...]] | None:
    """Return sentence and fix if the teacher's model at `key` gets other prompts, else None."""
    student, teacher = evidence.renderer, scorer.renderer
    messages = evidence.prompts[0].messages
    texts = [
        renderer.tokenizer.decode(list(renderer.render(messages)))
        for renderer in (student, teacher)
    ]
    if texts[0] == texts[1] and student.thinking == teacher.thinking:
        return None
    # The order is from the narrowest cause to the widest, so that the fix changes as little as
    # possible.
    if student.thinking != teacher.thinking or ("<think>" in texts[0]) != ("<think>" in texts[1]):
        text = (
            "only one of the two models writes its thoughts, "
            "because of the template's thinking switch"
        )
        return text, (f"{key}.thinking={json.dumps(student.thinking)}",)
    text = "student and teacher write prompts with different templates, each with its own"
    if teacher.template is not None:
        text += "; the recipe replaces the template of the teacher's model"
        return text, (f"{key}.template=null",)
    if student.system != teacher.system:
        return f"{text} system turn", (f"{key}.system={json.dumps(student.system)}",)
    gain = _estimate_template_gain(evidence)
    if gain is None or gain.low <= MIN_TEMPLATE_GAIN:
        return (
            f"{text}, and the student's template does not make the answers more likely for the teacher",
            (),
        )
    text += (
        "; the student's template makes the answers more likely for the teacher, by "
        f"{format_interval(gain)} nats per token"
    )
    template = student.template or student.tokenizer.chat_template
    return text, (f"{key}.template={json.dumps(template)}",)


def _estimate_template_gain(evidence: Evidence) -> Interval | None:
    """Return the teacher's gain from the student's template, in nats per token."""
    if evidence.template_logprobs is None:
        return None
    by_row = {
        id(row): logprobs
        for row, logprobs in zip(evidence.measurements, evidence.template_logprobs, strict=True)
    }
    return evidence.estimate_mean(
        lambda row: None if row.teacher_logprobs is None else by_row[id(row)] - row.teacher_logprobs
    )
