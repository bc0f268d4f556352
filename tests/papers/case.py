"""A small random batch in float64, the library's losses for it, and the loops for the papers' formulas."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from practicum.functional.dual_space import BothSpaces
from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.losses.passes import average_answers
from practicum.methods.uld.sorted import Config as Sorted
from practicum.objective import Objective, TeacherDistribution
from practicum.objective.signal_call import ANSWERS, SignalCall
from practicum.recipe import Recipe
from practicum.recipe.schedule import ScheduleState
from practicum.types import (
    AUTHORS,
    Datum,
    Judgement,
    Prompt,
    Rollout,
    Source,
    TeacherSignal,
)

V = 300
"""More than the candidates of every paper, so that top-k is a choice."""

OUTSIDE, OWN = 40, 26
"""With another tokenizer: the student's last tokens, which the teacher lacks, and the teacher's tokens that the student lacks."""

SPECIAL = range(100)
"""Every third token, so that the batch contains some of them."""


@dataclass
class Token:
    """One token of a rollout: distributions as log-probabilities [V], where `S` carries the gradient.

    `uniforms` are the random numbers with which `mc` signals draw more tokens in its place, and `level` is the
    difference of the teacher's raw logits and its log-probabilities. `advantage` is a critic's advantage of the token.
    `C` is the learner's distribution after the teacher's prompt, with a gradient too.
    For a teacher with another tokenizer, `own` are its tokens that the student lacks, and T the common tokens.
    `logits` are the student's before a softmax.
    """

    S: Tensor
    T: Tensor
    R: Tensor
    C: Tensor
    id: int
    position: int
    sampler: float
    uniforms: Tensor
    level: float
    advantage: float
    own: Tensor
    logits: Tensor

    @property
    def is_known(self) -> bool:
        """True if a teacher with another tokenizer has the token."""
        return self.id < V - OUTSIDE

    @property
    def special(self) -> bool:
        """True if no text contains the token."""
        return self.id in SPECIAL

    @property
    def lS(self) -> Tensor:
        """The learner's log-probability of the token."""
        return self.S[self.id]

    @property
    def lT(self) -> Tensor:
        """The teacher's log-probability of the token."""
        return self.T[self.id]

    @property
    def lR(self) -> Tensor:
        """The reference's log-probability of the token."""
        return self.R[self.id]


@dataclass
class Sequence:
    """One rollout: its tokens, its verifier's reward, its author, and its prompt.

    `score` is the judgement of every scorer that the recipe has.
    """

    tokens: list[Token]
    reward: float
    group: str
    source: Source
    text: str
    score: float

    def spans(self) -> list[list[Token]]:
        """Split the tokens as a teacher with another tokenizer: two together, then one, and so on."""
        spans: list[list[Token]] = []
        for place, token in enumerate(self.tokens):
            if starts_span(place):
                spans.append([])
            spans[-1].append(token)
        return spans


@dataclass
class Case:
    """The batch of a formula, at a step of a run: `step` of `steps`, counted from 1."""

    sequences: list[Sequence]
    step: int
    steps: int
    notes: dict[str, float] = field(default_factory=dict)

    def tokens(self) -> Iterator[Token]:
        """All tokens."""
        return (token for sequence in self.sequences for token in sequence.tokens)

    @property
    def count(self) -> int:
        """The number of tokens."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def groups(self) -> list[list[Sequence]]:
        """The rollouts of each prompt."""
        return [
            list(rows) for _, rows in groupby(self.sequences, key=lambda sequence: sequence.group)
        ]

    def token_mean(self, loss: Callable[[Token], Tensor]) -> Tensor:
        """Return the mean of a per-token loss over all tokens."""
        return sum((loss(token) for token in self.tokens()), torch.zeros(())) / self.count

    def sequence_mean(self, loss: Callable[[Token], Tensor]) -> Tensor:
        """Return the mean over rollouts of the mean over their tokens."""
        means = [
            sum(loss(token) for token in row.tokens) / len(row.tokens) for row in self.sequences
        ]
        return sum(means, torch.zeros(())) / len(means)


def list_spellings() -> list[tuple[int, int, int]]:
    """List the student's tokens that the teacher lacks, each as two tokens: a common one, and one of the teacher's.

    Columns count the student's tokens first, then the teacher's own.
    """
    entries = []
    for token in range(V - OUTSIDE, V):
        second = token - 150 if token % 2 else V + token % OWN
        entries += [(token, token - 200, 0), (token, second, 1)]
    return entries


def carry(logprobs: Tensor) -> Tensor:
    """Map a student's logits to the teacher's space: some of them, at other indices."""
    return torch.log_softmax(logprobs[..., : V - OUTSIDE + OWN].roll(7, -1), -1)


def lead(logprobs: Tensor, token: int) -> Tensor:
    """Exchange the most likely token with a given one, if its number is even and there are so many tokens."""
    if token % 2 or token >= len(logprobs):
        return logprobs
    exchanged, top = logprobs.clone(), int(logprobs.argmax())
    exchanged[token], exchanged[top] = logprobs[top], logprobs[token]
    return exchanged


def join_spans(
    teacher: TeacherDistribution, logits: Tensor, starts: list[int]
) -> TeacherDistribution:
    """Return the same teacher, which also knows a span of two tokens and the token after it as one more token.

    The mean of the teacher's logits in a span is the level at its start less 8.
    """
    assert teacher.unknown is not None and teacher.level is not None
    spans, unknown = torch.zeros(len(logits), 2, dtype=torch.float64), teacher.unknown.clone()
    for start, end in pairwise(starts):
        for first in range(start, end - 1, 3):
            unknown[first : min(first + 3, end)] = True
            if first + 3 <= end:
                spans[first] = torch.tensor([3.0, teacher.level[first] - 8.0])
                unknown[first] = False
    level = logits.logsumexp(-1)
    return replace(teacher, extras={"spans": spans}, unknown=unknown, student_level=level)


def cut_chunks(
    answer: TeacherDistribution, teacher: Tensor, ids: Tensor, starts: list[int]
) -> TeacherDistribution:
    """Return the same teacher, which also knows chunks that end before tokens of `SPECIAL`.

    A chunk has several spans if the teacher gives these tokens at most 0.1 before its last span.
    """
    chunks, unknown = torch.zeros(len(ids), 3, dtype=torch.float64), torch.ones(len(ids)).bool()
    words = torch.tensor(SPECIAL)
    ends = [*teacher[:, words].logsumexp(-1).tolist(), 0.0]
    for start, stop in pairwise(starts):
        first = start
        for after in range(start + 1, stop + 1):
            has_end = after < stop
            if has_end and (not starts_span(after - start) or ends[after] <= math.log(0.1)):
                continue
            text = teacher[range(first, after), ids[first:after]].sum()
            total = text + has_end * ends[after]
            chunks[first] = torch.tensor([after - first, total, has_end])
            unknown[first], first = False, after
    constants = {**answer.constants, "word_starts": words}
    return replace(answer, unknown=unknown, extras={"chunks": chunks}, constants=constants)


def place_spans(
    teacher: TeacherDistribution, starts: list[int], signal: SignalCall
) -> TeacherDistribution:
    """Return the same teacher, which answers at the start of each span, or at the first indices of a text.

    The column of a span has its length and, for two tokens, a quarter of the teacher's level, negated.
    """
    assert teacher.unknown is not None and teacher.level is not None
    by_index = isinstance(signal, Sorted) and signal.align == "index"
    column, known = torch.zeros(starts[-1], 2, dtype=torch.float64), list[int]()
    for start, end in pairwise(starts):
        firsts = [place for place in range(start, end) if starts_span(place - start)]
        for first, after in pairwise([*firsts, end]):
            several = after - first > 1
            column[first] = torch.tensor([after - first, -several * teacher.level[first] / 4])
        # The teacher has one token for each span.
        known += range(start, start + len(firsts)) if by_index else firsts
    unknown = torch.ones_like(teacher.unknown).index_fill(0, torch.tensor(known), False)
    name = "merged" if isinstance(signal, Sorted) else "averaged"
    return replace(teacher, extras={} if by_index else {name: column}, unknown=unknown)


def starts_span(place: int) -> bool:
    """Return whether a span of a teacher with another tokenizer begins at a position of an answer."""
    return place % 3 != 1


# (group, source, reward, length): right, wrong and partly right answers, a failed prompt, tokens of other writers.
ROWS: list[tuple[str, Source, float, int]] = [
    ("a", "student", 1.0, 3),
    ("a", "student", 0.0, 2),
    ("a", "teacher", 1.0, 4),
    ("a", "dataset", 1.0, 2),
    ("a", "reference", 0.0, 3),
    ("a", "reference", 0.5, 2),
    ("b", "student", 0.0, 3),
    ("b", "student", 0.0, 1),
    ("b", "teacher", 0.0, 3),
    ("b", "dataset", 0.0, 2),
    ("b", "reference", 0.5, 1),
    ("b", "reference", 0.5, 2),
    ("b", "reference", 0.0, 3),
    ("c", "student", 1.0, 2),
    ("c", "student", 0.5, 3),
    ("d", "student", 0.0, 2),
    ("d", "student", 0.0, 3),
    ("d", "teacher", 1.0, 2),
]
SCORES = [(row * 7 % 15 - 6) / 4 for row in range(len(ROWS))]
"""Scores of the answers: quarters in another order than the rewards, some below 0."""

ADVANTAGES = [(place * 5 % 11 - 4) / 4 for place in range(sum(length for *_, length in ROWS))]
"""A critic's advantages of the tokens: above and below 0, unordered."""

GAPS = {"gap_of_teacher": 0.00057, "gap_of_student": 0.00051}
"""The mean gaps of the first answers: with them one answer of each writer has an alpha between the bounds."""

TEXTS = ["x", "x", "y", "x", "y", "z", "x", "z", "z", "z", "x", "y", "z", "y", "y", "x", "z", "y"]


def library_and_formula(
    recipe: Recipe, formula: Callable[[Case], Tensor], step: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the gradients in the student's logits [T, V] of the recipe's objective and of a formula, at a step of its run.

    If the student also reads the teacher's prompt, the gradients in the logits after it follow: [2 T, V].
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(length for *_, length in ROWS)

    def logits() -> Tensor:
        # From nearly uniform to nearly certain.
        spread = 0.5 + 4.0 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
        return spread * torch.randn(count, V, generator=generator, dtype=torch.float64)

    student, other, reference = logits(), logits(), torch.log_softmax(logits(), -1)
    # At every third token the teacher nearly agrees, so that clips and thresholds only act at some tokens.
    near = torch.arange(count)[:, None] % 3 == 0
    teacher = torch.log_softmax(torch.where(near, student + 0.1 * other, other), -1)
    # At some tokens teacher and reference agree, so that their difference does not act everywhere.
    reference[1::5] = teacher[1::5]
    ids = torch.randint(V, (count,), generator=generator)
    own = torch.log_softmax(student, -1).gather(-1, ids[:, None])[:, 0]
    # The sampler is a slightly older student; a dataset's tokens have behaviour probability 1.
    sampler = (own + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)).clamp(
        max=-1e-3
    )
    starts = [sum(length for *_, length in ROWS[:row]) for row in range(len(ROWS) + 1)]
    for row, (_, source, _, _) in enumerate(ROWS):
        if source == "dataset":
            sampler[starts[row] : starts[row + 1]] = 0.0
    schedules = ScheduleState(recipe.schedules, recipe.train.steps)
    if step > 1:
        schedules.update({**GAPS, "nonfinite": 1.0})
    objective = recipe.replace_numbers(schedules.compute_numbers(step)).objective
    level = 5.0 + 2.0 * torch.randn(count, generator=generator, dtype=torch.float64)
    judges = {name: config.type for name, config in recipe.scorers.items()}
    own = torch.cat(
        [
            teacher[:, V - OUTSIDE : V - OUTSIDE + OWN - 1],
            teacher[:, V - OUTSIDE + OWN - 1 :].logsumexp(-1, keepdim=True),
        ],
        dim=-1,
    )
    distribution = TeacherDistribution(full=teacher, level=level)
    is_translated = recipe.teacher.type == "translated"
    if is_translated:
        outside = torch.arange(V - OUTSIDE, V)
        folded = torch.cat([teacher, own.logsumexp(-1, keepdim=True)], dim=-1)
        folded[:, outside] = -torch.inf
        distribution = (
            TeacherDistribution(logprobs=teacher.gather(-1, ids[:, None])[:, 0])
            if objective.signal is not None and objective.signal.sampled
            else TeacherDistribution(
                full=folded,
                outside=outside,
                unknown=torch.isin(ids, outside),
                own=own,
                level=level,
                constants={"spellings": torch.tensor(list_spellings())},
            )
        )
    if objective.losses[0].signal.name == "chunks":
        distribution = cut_chunks(distribution, teacher, ids, starts)
    context = logits()
    gradients, draws = {}, []
    for view, part in objective.split_by(lambda term: term.view).items():
        read = context if view[0] else student
        gradients[view], uniforms = _library(
            part, judges, read, distribution, reference, ids, sampler, starts, is_translated
        )
        draws.append(uniforms)
    # The loss of an environment's tokens is of separate tokens, here of the same tokens.
    after = gradients.pop((True, False), None)
    ours = sum(gradients.values())
    if after is not None:
        ours = torch.cat([ours, after])
    steps = (step, recipe.train.steps)
    both = student, context
    theirs = _formula(
        formula, both, teacher, reference, ids, sampler, draws[0], starts, steps, level, own
    )
    return ours, theirs


def _library(
    objective: Objective,
    judges: Mapping[str, str],
    logits: Tensor,
    teacher: TeacherDistribution,
    reference: Tensor,
    ids: Tensor,
    sampler: Tensor,
    starts: list[int],
    is_translated: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of one pass, and the random numbers [T, K] of drawn tokens."""
    for term in objective.losses:
        if term.signal.name in ("sorted", "projected"):
            teacher = place_spans(teacher, starts, term.signal)
    data = []
    for row, (group, source, reward, length) in enumerate(ROWS):
        part = slice(starts[row], starts[row + 1])
        rollout = Rollout(
            prompt=Prompt(group, ()),
            prompt_tokens=(1,),
            tokens=ids[part],
            loss_mask=torch.ones(length, dtype=torch.bool),
            sampling_logprobs=sampler[part],
            policy_logprobs=sampler[part],
            policy_version=0,
            stop_reason="stop",
            text=TEXTS[row],
            sample=row,
            reward=reward,
            source=source,
            authors=torch.full((length,), AUTHORS.index("environment"), dtype=torch.uint8)
            if objective.losses[0].observes
            else None,
            judgements={
                name: Judgement(
                    SCORES[row], torch.tensor(ADVANTAGES[part]) if kind == "value" else None
                )
                for name, kind in judges.items()
            },
        )
        begins = torch.tensor([starts_span(place) for place in range(length)])
        data.append(Datum(rollout, TeacherSignal(span_starts=begins if is_translated else None)))
    leaf = logits.clone().requires_grad_()
    batch = build_token_batch(data, objective, special=SPECIAL)
    student = torch.log_softmax(leaf, -1)
    if objective.learning is not None:
        # The teacher through the student's head is arbitrary, here the reference's distribution.
        assert teacher.full is not None and teacher.own is not None
        theirs = torch.cat([teacher.full[:, : V - OUTSIDE], teacher.own], dim=-1)
        best = theirs.argmax(dim=-1)
        labels = best.where(best < V - OUTSIDE, -1)
        through = torch.stack([lead(row, int(n)) for row, n in zip(reference, best, strict=True)])
        spaces = BothSpaces(through, carry(leaf), theirs, labels)
        teacher = replace(teacher, spaces=spaces)
    if objective.losses[0].signal.reads_answers:
        assert teacher.full is not None
        mine, theirs = (
            part.detach().gather(-1, ids[:, None])[:, 0] for part in (student, teacher.full)
        )
        teacher = replace(teacher, extras={ANSWERS: average_answers(mine, theirs, batch.rows)})
    if objective.losses[0].signal.name == "span_token":
        teacher = join_spans(teacher, leaf, starts)
    values = compute_term_values(
        student,
        teacher,
        batch,
        objective,
        TeacherDistribution(full=reference),
    )
    shares = [
        compute_coefficients(term, value.detach(), batch)
        for term, value in zip(objective.losses, values, strict=True)
    ]
    loss = sum(
        (share * value.loss_value).sum() for share, value in zip(shares, values, strict=True)
    )
    return torch.autograd.grad(loss, leaf)[0], batch.draws


def _formula(
    formula: Callable[[Case], Tensor],
    logits: tuple[Tensor, Tensor],
    teacher: Tensor,
    reference: Tensor,
    ids: Tensor,
    sampler: Tensor,
    uniforms: Tensor,
    starts: list[int],
    steps: tuple[int, int],
    level: Tensor,
    own: Tensor,
) -> Tensor:
    leaf, context = (part.clone().requires_grad_() for part in logits)
    student, in_context = torch.log_softmax(leaf, -1), torch.log_softmax(context, -1)
    sequences = []
    for row, (group, source, reward, _) in enumerate(ROWS):
        tokens = [
            Token(
                student[place],
                teacher[place],
                reference[place],
                in_context[place],
                int(ids[place]),
                place - starts[row],
                float(sampler[place]),
                uniforms[place],
                float(level[place]),
                ADVANTAGES[place],
                own[place],
                leaf[place],
            )
            for place in range(starts[row], starts[row + 1])
        ]
        sequences.append(Sequence(tokens, reward, group, source, TEXTS[row], SCORES[row]))
    loss = formula(Case(sequences, *steps))
    gradients = torch.autograd.grad(loss, [leaf, context], allow_unused=True)
    return torch.cat([gradient for gradient in gradients if gradient is not None])


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of two distributions given as log-probabilities."""
    return (p.exp() * (p - q)).sum()


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S."""
    middle = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def sg(value: Tensor) -> Tensor:
    """Stop the gradient."""
    return value.detach()
