"""A model teacher that scores each completion once: what it said is kept on disk and read back.

Of a model in this process hidden states are kept, from which the head rebuilds all log-probabilities (as DeepSeek-V4 does,
2606.19348; offline as in Lightning OPD, 2604.13010); of one behind a server what it said.
"""

import hashlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int8
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import RecipeError, TeacherError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.objective import Full, Signal
from practicum.ports import (
    Capabilities,
    DecodeBatch,
    LockstepClient,
    MixedRequest,
    SamplingClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    walk,
)
from practicum.teachers import none, pool, route, scripted
from practicum.teachers._scores import Entry, ScoreStore
from practicum.teachers.self import Config as SelfConfig
from practicum.types import (
    HeadLike,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

log = logging.getLogger(__name__)

_MIB = 2**20
_HIGHEST = 15
"""Hidden states are scaled so that a token's largest is below 2^15, half of what float16 can hold."""

_LEAST_SHIFT, _LARGEST_SHIFT = -113, 100


class Config(BaseModel):
    """Whose answers are kept, where, and how many."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["cached"] = "cached"
    teacher: Plugin("teachers") = Field(  # type: ignore[valid-type]
        description="who scores: a `model` or an `openai_api`, alone or inside `privileged`"
    )
    folder: Path | None = Field(
        default=None, description="where answers are kept; none: `scores` in the run's folder"
    )
    max_mib: float = Field(
        default=1024, gt=0, description="when a call's answers do not fit, no more are kept"
    )

    @model_validator(mode="after")
    def _does_not_change(self) -> "Config":
        for _, inside in walk(self.teacher):
            if isinstance(inside, SelfConfig):
                raise ValueError(_about_self(inside))
            if isinstance(inside, route.Config | pool.Config):
                raise ValueError(
                    f"a {inside.type} is several teachers; put `cached` inside each member that is a model"
                )
            if isinstance(inside, Config):
                raise ValueError("the teacher inside is cached already; take one `cached` away")
            if isinstance(inside, none.Config | scripted.Config):
                raise ValueError(
                    f"{inside.type!r} scores without a model, so there is nothing to keep; take `cached` away"
                )
            if (
                isinstance(inside, ModelConfig)
                and isinstance(inside.model, ScratchConfig)
                and self.folder is not None
            ):
                raise ValueError(
                    "folder: a model made from scratch is another one in every run; leave folder out, and its answers are "
                    "kept in the run's own"
                )
        return self

    def capabilities(self) -> Capabilities:
        """Those of the teacher inside."""
        return self.teacher.capabilities()

    def members(self) -> dict[str, TeacherConfig]:
        """The teacher inside."""
        return {"teacher": self.teacher}


def _about_self(config: SelfConfig) -> str:
    if config.weights == "frozen":
        return "`self` is not kept; name the student's model as {type: model, model: ...}, which answers the same"
    return f"a `self` teacher with {config.weights} weights follows the student, so its answers change; take `cached` away"


@dataclass(slots=True)
class Counts:
    """What was asked since the teacher was built: `found` of the `asked` were there, `left_out` came when all was full."""

    asked: int = 0
    found: int = 0
    left_out: int = 0


class CachingClient:
    """Scores with a model, each completion once; see `practicum.ports.SamplingClient`.

    An answer is found by all that it depends on: the model, the prompt's tokens as the model reads them, the completion's
    tokens, and the signal. It is rounded to its stored form also where it is not kept. A call's new answers are kept all or
    none, so a call that comes again, in a run resumed from before it, finds all of them or none, and then the model reads
    the same batch as the first time.
    """

    def __init__(self, bare: SamplingClient, fetch: "Callable[[], ModelScores]") -> None:
        self.bare = bare
        self.counts = Counts()
        self._fetch = fetch
        self._kept: ModelScores | None = None
        self._head: HeadLike | None = None
        self._device = torch.device("cpu")
        self._said_full = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the model."""
        return self.bare.capabilities

    @property
    def scores(self) -> ScoreStore | None:
        """What is kept; None before the first question, and where nothing is kept."""
        return None if self._kept is None else self._kept.scores

    def remark(self) -> str:
        """Return one line about how much was there and what a token takes."""
        counts, scores = self.counts, self.scores
        found = f"{counts.found} of {counts.asked} completions were scored before"
        if scores is None or not scores.tokens:
            return found
        left_out = f", {counts.left_out} did not fit" if counts.left_out else ""
        return (
            f"{found}{left_out}; {scores.size / scores.tokens:.0f} bytes a token in {scores.folder}"
        )

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """The model's own answers."""
        return self.bare.sample(requests, params)

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the model says, or said; float32 hidden states as they come back from float16."""
        if not requests:
            return []
        if self._kept is None:
            self._kept = self._fetch()
        if self._kept.scores is not None:
            self._kept.scores.refresh()
        forms = _forms(signal)
        names = [tuple(self._kept.key(request, form) for form in forms) for request in requests]
        asked = dict(zip(names, requests, strict=True))
        entries = {name: entry for name in asked if (entry := self._found(name)) is not None}
        self.counts.asked += len(names)
        self.counts.found += sum(name in entries for name in names)
        missing = {name: request for name, request in asked.items() if name not in entries}
        if missing:
            entries |= self._asked(missing, signal)
        if self._head is None and any("hidden" in entry for entry in entries.values()):
            self._take_head(requests[0])
        return [self._signal(entries[name]) for name in names]

    def _found(self, names: tuple[bytes, ...]) -> Entry | None:
        """What is kept under the first of the names that is known."""
        scores = self.scores
        known = [] if scores is None else [name for name in names if name in scores]
        return scores.read(known[0]) if scores is not None and known else None

    def _asked(
        self, missing: Mapping[tuple[bytes, ...], ScoreRequest], signal: Signal
    ) -> dict[tuple[bytes, ...], Entry]:
        """The model's own answers in their stored form, kept where they may be; those that others kept meanwhile count."""
        answers = self.bare.score(list(missing.values()), signal)
        new = {name: _stored(answer) for name, answer in zip(missing, answers, strict=True)}
        for request, entry in zip(missing.values(), new.values(), strict=True):
            _check(request, entry, next(iter(new.values())))
        states = answers[0].states
        if answers[0].head is not None and states is not None and self._head is None:
            self._head, self._device = answers[0].head, states.device
        scores = self.scores
        if scores is None or not all(map(_finite, new.values())):
            return new
        key = {name: name[0] if "hidden" in entry else name[-1] for name, entry in new.items()}
        taken = scores.keep({key[name]: entry for name, entry in new.items()})
        self.counts.left_out += sum(key[name] not in scores for name in new)
        if scores.full and not self._said_full:
            self._said_full = True
            log.warning(
                f"{scores.folder} is full ({scores.size / _MIB:.1f} MiB kept), so no more of the teacher's answers are "
                "kept; what is there is used"
            )
        return {
            name: scores.read(key[name]) if key[name] in taken else entry
            for name, entry in new.items()
        }

    def _take_head(self, request: ScoreRequest) -> None:
        """The head and its device, from an answer about one token; only where nothing was asked of the model before."""
        (answer,) = self.bare.score(
            [ScoreRequest(request.prompt_tokens[-1:], request.tokens[:1])], Full()
        )
        states = answer.states
        if states is not None:
            self._head, self._device = answer.head, states.device

    def _signal(self, entry: Entry) -> TeacherSignal:
        """The answer that an entry stands for; hidden states where the model is, all else in CPU memory."""
        ids = entry.get("topk_ids")
        hidden = entry.get("hidden")
        if hidden is not None and "exponents" in entry:
            hidden = unscaled(hidden, entry["exponents"])
        return TeacherSignal(
            logprobs=entry.get("logprobs"),
            topk_ids=None if ids is None else ids.long(),
            topk_logprobs=entry.get("topk_logprobs"),
            hidden=None if hidden is None else hidden.to(self._device),
            head=None if hidden is None else self._head,
        )


class KeepingLockstep(CachingClient):
    """The same over a client that decodes in lockstep with another; what is drawn is not kept."""

    bare: LockstepClient  # type: ignore[assignment]

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """What the model reads."""
        return self.bare.read(prompts, rows, new_tokens)

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: LockstepClient,
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """What the two draw."""
        return self.bare.sample_mixed(requests, teacher, share, params)


@dataclass(frozen=True, slots=True)
class ModelScores:
    """The fingerprint of a model, and what is kept of it; `scores` is None where nothing is."""

    fingerprint: str
    scores: ScoreStore | None

    def key(self, request: ScoreRequest, form: str) -> bytes:
        """The SHA-256 sum of all that an answer depends on."""
        prompt, tokens = array("q", request.prompt_tokens), array("q", request.tokens)
        start = f"{self.fingerprint} {form} {len(prompt)} ".encode()
        named = (
            b""
            if request.candidates is None
            else array("q", request.candidates.flatten().tolist()).tobytes()
        )
        width = b"" if request.candidates is None else f" {request.candidates.shape[1]} ".encode()
        return hashlib.sha256(start + prompt.tobytes() + tokens.tobytes() + width + named).digest()


def scaled(hidden: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T D"], Int8[Tensor, " T"]]:
    """Hidden states in float16 after each token's is multiplied by a power of 2, and the powers' exponents.

    The largest of a token comes to lie below 2^15, so none overflows, and the relative error is that of float16 (2^-11)
    down to 2^-29 of the largest.
    """
    largest = (
        hidden.float().abs().amax(dim=-1) if hidden.shape[-1] else hidden.new_zeros(len(hidden))
    )
    exponents = _HIGHEST - torch.frexp(largest).exponent
    exponents = exponents.where(torch.isfinite(largest), 0).clamp(_LEAST_SHIFT, _LARGEST_SHIFT)
    return (hidden.float() * _power(exponents)).half(), exponents.to(torch.int8)


def unscaled(hidden: Float[Tensor, "T D"], exponents: Int8[Tensor, " T"]) -> Float[Tensor, "T D"]:
    """The float32 hidden states that `scaled` gave; powers of 2 lose nothing."""
    return hidden.float() * _power(-exponents.int())


def _power(exponents: Tensor) -> Tensor:
    """2^exponent as a column of float32, made of its bits, for a power function may round."""
    return ((exponents.int() + 127) << 23).view(torch.float32)[:, None]


def _stored(answer: TeacherSignal) -> Entry:
    """An answer in its stored form, widest numbers first: hidden states of 16 bits as they are, others scaled to float16."""
    entry: Entry = {}
    if answer.topk_ids is not None:
        entry["topk_ids"] = answer.topk_ids.int()
    if answer.topk_logprobs is not None:
        entry["topk_logprobs"] = answer.topk_logprobs.float()
    if answer.logprobs is not None:
        entry["logprobs"] = answer.logprobs.float()
    states = answer.states
    if states is not None and states.dtype in (torch.bfloat16, torch.float16):
        entry["hidden"] = states
    elif states is not None:
        entry["hidden"], entry["exponents"] = scaled(states)
    return {name: tensor.cpu() for name, tensor in entry.items()}


def _check(request: ScoreRequest, entry: Entry, first: Entry) -> None:
    """TeacherError where an answer is not about its tokens, or says other things than the first one of its call."""
    if not entry or any(len(tensor) != len(request.tokens) for tensor in entry.values()):
        raise TeacherError(
            f"the model's answer does not cover the {len(request.tokens)} tokens it was asked about; score exactly the given "
            "tokens, or take `cached` away"
        )
    if [_kind(*item) for item in entry.items()] != [_kind(*item) for item in first.items()]:
        raise TeacherError(
            "the model answers one call in several forms, which cannot be kept; take `cached` away"
        )


def _kind(name: str, tensor: Tensor) -> tuple[object, ...]:
    return name, tensor.dtype, tensor.shape[1:]


def _finite(entry: Entry) -> bool:
    """Whether every number is one: a fault of the moment must not be kept for good."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in entry.values())


def _forms(signal: Signal) -> tuple[str, ...]:
    """The forms that answer a signal, best first; hidden states answer every signal that asks for candidates."""
    return (
        ("full", f"topk({signal.candidates}, {signal.chooser})")
        if signal.candidates
        else (signal.type,)
    )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the teacher inside over a model that remembers; without a place to keep answers it only rounds."""
    place = (
        context.scores if config.folder is None else context.base_dir / config.folder.expanduser()
    )
    place = None if context.on_paper else place
    made: list[CachingClient] = []

    def keep(client: SamplingClient, name: Callable[[Path], str]) -> SamplingClient:
        def fetch() -> ModelScores:
            if place is None:
                return ModelScores("", None)
            mark = name(place)
            return ModelScores(mark, ScoreStore(place / mark, int(config.max_mib * _MIB)))

        kind = KeepingLockstep if isinstance(client, LockstepClient) else CachingClient
        made.append(kind(client, fetch))
        return made[-1]

    teacher = context.build(replace(context, keep=keep), config.teacher)
    if len(made) != 1:
        raise RecipeError(
            f"cached: the teacher inside loads {len(made)} models, and the answers of exactly one are kept; put `cached` "
            "around each model by itself"
        )
    context.after_training.append(lambda: log.info(made[0].remark()))
    return teacher
