"""Combinations in a recipe that cannot work; each problem names the settings that would work."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

import torch

from practicum.core.plugins import load_plugin
from practicum.models.config import StudentConfig
from practicum.objective import VERIFIER, Objective, Term
from practicum.ports import Capabilities, TeacherConfig, walk
from practicum.ports.notes import NoteConfig
from practicum.ports.scoring import ScorerSettings
from practicum.recipe.sections import RolloutConfig, TrainConfig
from practicum.rollouts import HeldoutSearch, SourceConfig
from practicum.rollouts.fields import ROLLOUT_FIELDS

STALENESS = "rollout.max_staleness"

PREFERRED = frozenset({"teacher", "dataset"})
"""The writers that a discriminator prefers to the student."""

ENGINE_CORRECTION = "ratio_truncate(2)"
"""The importance correction of sampled tokens that an engine samples."""


def find_capability_problems(
    objective: Objective, capabilities: Capabilities, teacher: str, against: str = "teacher"
) -> list[str]:
    """Return a problem for each loss term with a signal that the teacher cannot return."""
    problems = []
    for number, term in enumerate(objective.losses):
        where = f"objective.losses[{number}].signal"
        if not term.needs_signal or term.against != against:
            continue
        if not capabilities.signals and capabilities.writes:
            problems.append(
                f"{where}: {term.signal.name!r} asks for scores of tokens, and {against} "
                f"{teacher!r} only writes text; set signal: text, divergence: ce and rollout.source: "
                f"{against}, or use a recipe that only needs the teacher's text, such as papers/seqkd"
            )
        elif not capabilities.signals:
            problems.append(
                f"{where}: {term.signal.name!r} needs a teacher and the recipe has none; "
                "set teacher: ..., or a signal that needs no teacher: score for the verifier's "
                "reward, text for the rollout's own tokens"
            )
        elif problem := term.explain_refusal(capabilities):
            problems.append(f"{where}: {against} {teacher!r} {problem}")
    return problems


def find_context_problems(
    objective: Objective, teacher: TeacherConfig, capabilities: Capabilities
) -> list[str]:
    """Return a problem for each term that reads the teacher's prompt if the student cannot."""
    is_student = all(part.members() or part.name == "self" for _, part in walk(teacher))
    if is_student and capabilities.writes:
        return []
    return [
        f"objective.losses[{number}].context: the student only reads the prompt of a teacher with "
        "its own tokens, and of a context that shows no completion; set teacher: {type: privileged, "
        "teacher: {type: self, weights: live}, reference: ...} without siblings, attempts and notes, "
        "or context: student"
        for number, term in enumerate(objective.losses)
        if term.context == "teacher"
    ]


def find_anchor_problems(objective: Objective, source: SourceConfig) -> list[str]:
    """Return a problem for each term that needs the reference's answers if the reference writes none."""
    if "reference" in source.other_writers:
        return []
    return [
        f"objective.losses[{number}]: its advantage compares with the reference's answers, and the "
        "reference writes none; set rollout.source: join(reference, 4)"
        for number, term in enumerate(objective.losses)
        if term.compares_with_reference
    ]


def find_truncation_problem(objective: Objective, rollout: RolloutConfig) -> list[str]:
    """Return a problem if a loss on sampled tokens is combined with a truncated sampler."""
    # The estimate assumes tokens of the student's full distribution. A truncated sampler never
    # draws the tail, so the tail gets no gradient, and nothing corrects for it.
    is_truncated = rollout.top_p < 1.0 or rollout.top_k > 0
    uncorrected = _list_uncorrected_signals(objective, ask_teacher=True)
    if not (is_truncated and uncorrected):
        return []
    return [
        "rollout.top_p and rollout.top_k exclude tokens, and signal 'sampled' gives excluded tokens "
        "no gradient; set top_p: 1 and top_k: 0, signal: full or topk, or a correction such as "
        "ratio for the tokens that remain"
    ]


def find_staleness_problems(
    rollout: RolloutConfig,
    teacher: TeacherConfig,
    adaptive_paths: Iterable[str],
    reference: TeacherConfig | None = None,
) -> list[str]:
    """Return a problem for each part of a recipe that cannot run ahead of the updates.

    `adaptive_paths` are the paths of numbers that are only known step by step.
    """
    if not rollout.max_staleness:
        return []
    problems = []
    if rollout.source.replays:
        problems.append(
            f"{STALENESS} is {rollout.max_staleness}, and mix(other=replay) learns from "
            "completions of any age; set max_staleness: 0, or source: student"
        )
    writers = rollout.source.other_writers
    if "teacher" in writers and teacher.capabilities().follows_student:
        problems.append(
            f"{STALENESS} is {rollout.max_staleness}, and teacher {teacher.name!r} may follow the "
            "student, so it cannot write ahead of it; set max_staleness: 0, source: student, or "
            "a teacher with separate weights, {type: model, model: ...}"
        )
    is_asked = reference is not None and "reference" in writers
    if reference is not None and is_asked and reference.capabilities().follows_student:
        problems.append(
            f"{STALENESS} is {rollout.max_staleness}, and reference {reference.name!r} may follow "
            "the student, so it cannot write ahead of it; set max_staleness: 0"
        )
    problems += [
        f"{path}: requests to teachers are fixed ahead if {STALENESS} is above 0; "
        "set a number, or linear or cosine"
        for path in adaptive_paths
        if ".signal" in path
    ]
    return problems


def find_scorer_problems(
    objective: Objective, scorers: Mapping[str, ScorerSettings], rollout: RolloutConfig
) -> list[str]:
    """Return a problem for each loss term or source with a scorer that is missing from the recipe."""
    problems = [
        f"objective.losses[{number}].scorer: no scorer is named {term.scorer!r}; set "
        f"{' or '.join([VERIFIER, *scorers])}, or add it to scorers: {{{term.scorer}: {{type: ...}}}}"
        for number, term in enumerate(objective.losses)
        if term.scorer not in (VERIFIER, *scorers)
    ]
    source = rollout.source
    where = f"rollout.source: {source.name}(scorer={source.guide})"
    problems += _find_guide_problems(scorers, source, where, "set source: student")
    if source.guide is not None and rollout.max_staleness:
        problems.append(
            f"{STALENESS} is {rollout.max_staleness}, and scorer {source.guide!r}, which may learn "
            f"from each step, guides the {source.name}; set max_staleness: 0, or source: student"
        )
    if not PREFERRED & set(rollout.source.other_writers):
        problems += [
            f"scorers.{name}: it learns to prefer the teacher's answers to the student's, and with "
            f"rollout.source: {rollout.source.name} no rollout is the teacher's; set "
            "rollout.source: join(teacher), or join(dataset) for stored answers"
            for name, config in scorers.items()
            if config.imitates_teacher
        ]
    if VERIFIER in scorers:
        problems.append(
            f"scorers.{VERIFIER}: that is the name of the task's own reward; choose another name"
        )
    return problems


def _find_guide_problems(
    scorers: Mapping[str, ScorerSettings], source: SourceConfig, where: str, instead: str
) -> list[str]:
    """Return the problems that keep a source from asking its scorer while it writes."""
    guide = source.guide
    if guide is None:
        return []
    if guide not in scorers:
        return [
            f"{where}: no scorer is named {guide!r}; add it to scorers: "
            f"{{{guide}: {{type: {source.guide_example}}}}}, or {instead}"
        ]
    if source.guide_rejects and not scorers[guide].rejects:
        return [
            f"{where}: scorer {guide!r} rejects no answers; use a scorer that does, such as "
            f"{{type: {source.guide_example}}}"
        ]
    return []


def find_search_problems(
    search: HeldoutSearch | None, scorers: Mapping[str, ScorerSettings]
) -> list[str]:
    """Return why a source cannot answer the held-out prompts without their reference answers."""
    if search is None:
        return []
    source, guide = search.source, search.source.guide
    where = "evaluation.search.source"
    if reason := source.explain_no_evaluation():
        advice = "" if "; set " in reason else "; set search(scorer=NAME, reward=scorer, keep=1)"
        return [f"{where}: {source.name} {reason}{advice}"]
    problems = _find_guide_problems(scorers, source, where, "leave evaluation.search out")
    if not problems and guide is not None and scorers[guide].shows_reference:
        problems.append(
            f"{where}: scorer {guide!r} reads the rows' answers, which an evaluation may not; take "
            f"{{reference}} out of scorers.{guide}.template, or use {{type: {source.guide_example}}}"
        )
    return problems


def find_note_problems(
    notes: Mapping[str, NoteConfig],
    scorers: Mapping[str, ScorerSettings],
    teacher: TeacherConfig,
    reference: TeacherConfig | None,
    rollout: RolloutConfig,
) -> list[str]:
    """Return a problem for each note with a taken name, each missing note, and each impossible note."""
    max_staleness = rollout.max_staleness
    models = {"teacher": teacher.capabilities()}
    if reference is not None:
        models["reference"] = reference.capabilities()
    problems = [
        f"notes.{name}: a placeholder has this name already; choose another"
        for name in notes
        if name in ("answer", *ROLLOUT_FIELDS)
    ]
    note = rollout.source.note_made
    places = [(f"rollout.source: {rollout.source.name}(note={note})", note)] if note else []
    places += [
        (f"scorers.{scorer}.template", name)
        for scorer, config in scorers.items()
        for name in config.notes_read
    ]
    problems += [
        f"{place}: no field or note is named {name!r}; add it to notes: {{{name}: {{type: ...}}}}"
        for place, name in places
        if name not in notes
    ]
    for name, config in notes.items():
        problems += config.find_problems(name, list(notes), models)
        if max_staleness and config.follows_student(models):
            problems.append(
                f"{STALENESS} is {max_staleness}, and notes.{name} needs the newest student or the "
                "steps before, so it cannot be made ahead; set max_staleness: 0, or a writer "
                "with separate weights, {type: model, model: ...}"
            )
    return problems


def find_segment_problems(rollout: RolloutConfig) -> list[str]:
    """Return the settings that are incompatible with answers that continue in a later step."""
    if rollout.segment_tokens is None:
        return []
    problems = []
    if not rollout.source.writes_segments:
        problems.append(
            f"rollout.segment_tokens is {rollout.segment_tokens}, and only the student's own answers "
            "continue in a later step; set source: student, or leave segment_tokens out"
        )
    if rollout.max_staleness:
        problems.append(
            f"{STALENESS} is {rollout.max_staleness}, and rollout.segment_tokens continues answers "
            "with the newest weights; set max_staleness: 0, or leave segment_tokens out"
        )
    return problems


def find_curriculum_problems(rollout: RolloutConfig, train: TrainConfig) -> list[str]:
    """Return the settings that are incompatible with prompts chosen by the newest answers."""
    if rollout.max_staleness and train.curriculum is not None and train.curriculum.run is None:
        return [
            f"{STALENESS} is {rollout.max_staleness}, and train.curriculum chooses prompts by the "
            "newest answers; set max_staleness: 0, or give the run whose answers count"
        ]
    return []


def find_engine_problems(
    rollout: RolloutConfig, student: StudentConfig, is_trained_here: bool
) -> list[str]:
    """Return the requirements of the recipe that its engine, if it has one, cannot meet."""
    if rollout.engine is None or not rollout.engine.may_sample:
        return []
    problems = rollout.engine.problems(rollout.source.mixes_tokens, rollout.max_staleness)
    if not is_trained_here:
        problems.append(
            "rollout.engine: the student's weights are at a service, which samples itself; leave "
            "engine out"
        )
    if student.quantization is not None:
        problems.append(
            "rollout.engine: an engine holds all weights in full precision, and student.quantization "
            "keeps them in fewer bits; remove one of them"
        )
    return problems


def fill_engine(
    rollout: RolloutConfig, student: StudentConfig, is_trained_here: bool
) -> RolloutConfig:
    """Return the settings with engine `auto` if none is named and this machine can have one.

    Models from scratch keep the local sampler: vLLM does not support all of their widths.
    """
    is_pretrained = isinstance(student.model, str) and student.drafter is None
    if rollout.engine is not None or rollout.draft is not None or not is_pretrained:
        return rollout
    is_on_gpu = student.device in ("auto", "cuda") and torch.cuda.is_available()
    if not is_on_gpu or find_spec("vllm") is None:
        return rollout
    engine = load_plugin("practicum.engines", "auto").Config()
    chosen = rollout.model_copy(update={"engine": engine})
    return rollout if find_engine_problems(chosen, student, is_trained_here) else chosen


def find_speculation_problems(
    rollout: RolloutConfig, student: StudentConfig, backend: str
) -> list[str]:
    """Return the reasons why the student cannot sample with the recipe's drafter, if it has one."""
    reasons = {
        f"backend {backend!r} samples without drafts": backend != "local",
        "an engine samples": rollout.engine is not None and rollout.engine.may_sample,
        "student.drafter already drafts": student.drafter is not None,
        "with max_staleness, a copy of the student samples": rollout.max_staleness > 0,
        "student and teacher sample each token together": rollout.source.mixes_tokens,
    }
    return [
        f"rollout.draft: {reason}, so the drafter would have no effect; leave draft out"
        for reason, applies in reasons.items()
        if rollout.draft is not None and applies
    ]


def correct_for_engine(objective: Objective) -> Objective:
    """Return the objective with an importance correction on each sampled token without a setting.

    An engine's kernels round differently from the trainer's, so its tokens are never exactly
    on-policy. Terms that name a correction, including `none`, are not changed.
    """
    # Validate instead of copying, so that the run folder shows the correction as an explicit setting.
    losses = tuple(
        Term.model_validate({**dict(term), "correction": ENGINE_CORRECTION})
        if term.on_sampled_token and "correction" not in term.model_fields_set
        else term
        for term in objective.losses
    )
    return objective.model_copy(update={"losses": losses})


def explain_staleness(objective: Objective, rollout: RolloutConfig) -> str | None:
    """Return a warning if tokens of an older policy are trained on as if they were on-policy."""
    uncorrected = _list_uncorrected_signals(objective)
    is_cut = (rollout.segment_tokens or rollout.max_new_tokens) < rollout.max_new_tokens
    if uncorrected and is_cut:
        return (
            f"rollout.segment_tokens is {rollout.segment_tokens}, and signal {uncorrected[0]!r} with "
            "correction none treats an older policy's tokens as the learner's own; set "
            "correction: ratio_truncate(2), or signal: full"
        )
    if not (rollout.max_staleness and uncorrected):
        return None
    return (
        f"{STALENESS} is {rollout.max_staleness}, and signal {uncorrected[0]!r} with correction "
        "none treats an older policy's tokens as the learner's own; set correction: "
        "ratio_truncate(2), or signal: full"
    )


def _list_uncorrected_signals(objective: Objective, *, ask_teacher: bool = False) -> list[str]:
    return [
        term.signal.name
        for term in objective.losses
        if term.signal.sampled
        and term.correction.name == "none"
        and (term.needs_signal or not ask_teacher)
    ]


def explain_clip(objective: Objective) -> str | None:
    """Return a warning if a clip pushes down the candidates that the teacher wants most."""
    indices = [index for index, term in enumerate(objective.losses) if term.clip.clips_entries]
    if not indices:
        return None
    return (
        f"objective.losses[{indices[0]}].clip 'entries' removes a candidate's own pull but "
        "keeps the push from every other candidate, so the candidates that the teacher prefers most "
        "become less likely; set clip: none, or clip: loss(1.0)"
    )
