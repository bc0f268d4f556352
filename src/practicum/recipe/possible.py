"""What in a recipe cannot go together, each problem with what to write instead."""

from practicum.objective import Draws, Full, Objective, Sampled, TopK
from practicum.ports import Capabilities
from practicum.recipe.sections import RolloutConfig


def capability_problems(
    objective: Objective, capabilities: Capabilities, teacher: str, against: str = "teacher"
) -> list[str]:
    """What the objective asks of a teacher that cannot give it, each with what it can."""
    can = ", ".join(sorted(capabilities.signals))
    problems = []
    for number, term in enumerate(objective.losses):
        where = f"objective.losses[{number}].signal"
        signal = Full() if isinstance(term.signal, Draws) else term.signal
        if not term.asks or term.against != against:
            continue
        if not can:
            problems.append(
                f"{where}: {term.signal.type!r} asks a teacher and there is none; write teacher: ..., or a signal that asks "
                "nobody: score for the verifier's reward, text for the rollout's own tokens"
            )
        elif signal.type not in capabilities.signals:
            problems.append(f"{where}: {against} {teacher!r} cannot give signal {signal.type!r}; it can give: {can}")
        elif isinstance(signal, TopK) and signal.support not in capabilities.supports:
            supports = ", ".join(sorted(capabilities.supports))
            problems.append(f"{where}: teacher {teacher!r} cannot score support {signal.support!r}; it can: {supports}")
        elif isinstance(signal, TopK) and capabilities.largest_k is not None and signal.k > capabilities.largest_k:
            most = capabilities.largest_k
            problems.append(
                f"{where}: teacher {teacher!r} answers at most k={most}, not {signal.k}; write topk({most}, support=teacher), or "
                "sampled"
            )
    return problems


def truncation_problem(objective: Objective, rollout: RolloutConfig) -> str | None:
    """Why a sampled token's loss and a truncated sampler do not go together, where a recipe has both."""
    truncated = rollout.top_p < 1.0 or rollout.top_k > 0
    sampled = any(isinstance(term.signal, Sampled) and term.correction.name == "none" for term in objective.losses)
    if not (truncated and sampled):
        return None
    return (
        "rollout.top_p and rollout.top_k cut tokens off that signal 'sampled' can then never learn about; write top_p: 1 and "
        "top_k: 0, signal: full or topk, or a correction such as ratio for what was kept"
    )
