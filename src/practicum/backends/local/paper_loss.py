"""Count the bytes of the logit side of an update: the real loss of one chunk, without numbers."""

import torch

from practicum.backends.local.paper import LiveBytes
from practicum.backends.local.precision import DTYPES
from practicum.functional.chunked import BufferPool
from practicum.functional.head import Head
from practicum.losses import build_chunk, build_token_batch, compile_objective
from practicum.objective import Objective, Signal
from practicum.ports.paper import PaperRecord
from practicum.types import Datum, Prompt, Rollout, TeacherSignal

META = torch.device("meta")
"""The device of tensors that have sizes and no memory; code for a GPU takes the GPU's path there."""


def measure_loss(record: PaperRecord, objective: Objective, tokens: int) -> tuple[int, int]:
    """Return the bytes that remain after a chunk of `tokens` tokens, and the peak while it is computed.

    Raises RuntimeError or PracticumError if the objective's loss depends on numbers.
    """
    zeros, mask = torch.zeros(tokens), torch.ones(tokens, dtype=torch.bool)
    rollout = Rollout(Prompt("0", ()), (0,), zeros.long(), mask, zeros, zeros, 0, "length", "")
    signals = {"teacher": objective.signal, "reference": objective.reference_signal}
    teacher, reference = (_build_signal(record, *pair, tokens) for pair in signals.items())
    head, hidden = _build_student(record, tokens)
    batch = build_token_batch([Datum(rollout, teacher)], objective, 0, None).to(META)
    compiled, pool = compile_objective(objective), BufferPool()
    owners = (*teacher.heads, *reference.heads, head)
    weights = [owner.weight for owner in owners if isinstance(owner, Head)]
    states = [s.hidden for s in (teacher, reference) if isinstance(s.hidden, torch.Tensor)]
    uncounted = [*weights, *states, hidden, head.rows, *filter(torch.is_tensor, [head.weight.grad])]
    with LiveBytes(iter(uncounted)) as live:
        chunk = build_chunk(head, hidden, (teacher, reference), batch, compiled, pool)
        chunk.backward([torch.ones(tokens, device=META) for _ in objective.losses])
        peak = live.peak
        del chunk
        return live.total, peak


def _build_student(record: PaperRecord, tokens: int) -> tuple[Head, torch.Tensor]:
    """Return the student's head, in float32 if it learns, and hidden states."""
    size, width = record.dims.vocabulary, record.dims.width
    weight = torch.empty(size, width, device=META, dtype=DTYPES[record.dtype])
    head = Head(weight, size)
    if record.trainable_dims.head:
        wide = torch.nn.Parameter(weight.float())
        wide.grad = torch.zeros_like(wide)
        head = Head(wide, size, operand=None if record.dtype == "float32" else weight)
    return head, torch.empty(tokens, width, device=META, dtype=head.weight.dtype)


def _build_signal(
    record: PaperRecord, role: str, signal: Signal | None, tokens: int
) -> TeacherSignal:
    """Return a signal with the sizes of the widest scorer in a role."""
    scorers = [s for name, s in record.scorers.items() if name.partition("/")[0] == role]
    if signal is None:
        return TeacherSignal()
    if signal.sampled or not scorers:
        return TeacherSignal(logprobs=torch.zeros(tokens, device=META))
    scorer = max(scorers, key=lambda scorer: scorer.dims.width)
    name = record.dtype if scorer.config is None else scorer.config.dtype
    dtype = torch.float32 if name == "auto" else DTYPES[name]
    dims = scorer.dims
    weight = torch.empty(dims.vocabulary, dims.width, device=META, dtype=dtype)
    hidden = torch.empty(tokens, dims.width, device=META, dtype=dtype)
    return TeacherSignal(hidden=hidden, head=Head(weight, dims.vocabulary))
