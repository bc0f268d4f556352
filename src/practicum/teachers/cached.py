"""A model teacher that scores each completion once: its answers are stored on disk and reused.

For a local model, hidden states are stored, and the head recomputes all log-probabilities from them
(as in DeepSeek-V4, 2606.19348; offline as in Lightning OPD, 2604.13010). For a model behind a
server, its answers are stored.
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
from pydantic import Field, model_validator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import RecipeError, TeacherError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.objective import Full, Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    walk,
)
from practicum.ports.wrapping import WrappedClient
from practicum.teachers import none, pool, route, scripted
from practicum.teachers.self import Config as SelfConfig
from practicum.teaching.scores import Entry, ScoreStore
from practicum.types import HeadLike, ScoreRequest, TeacherSignal

log = logging.getLogger(__name__)

_MIB = 2**20
_HIGHEST = 15
"""Scaled hidden states are below 2^15 in each token, half of the largest float16."""

_LEAST_SHIFT, _LARGEST_SHIFT = -113, 100


class Config(TeacherConfig):
    """The teacher with stored answers, the folder and its maximum size."""

    type: Literal["cached"] = "cached"
    teacher: Plugin("teachers", TeacherConfig) = Field(  # type: ignore[valid-type]
        description="the scorer: a `model` or an `openai_api`, or one of them inside `privileged`"
    )
    folder: Path | None = Field(
        default=None, description="folder of the answers; none: `scores` in the run's folder"
    )
    max_mib: float = Field(
        default=1024,
        gt=0,
        description="maximum size; no more is stored after a call that does not fit",
    )

    @model_validator(mode="after")
    def _check_inner(self) -> "Config":
        for _, inner in walk(self.teacher):
            if isinstance(inner, SelfConfig):
                raise ValueError(_explain_self(inner))
            if isinstance(inner, route.Config | pool.Config):
                raise ValueError(
                    f"a {inner.type} is several teachers; put `cached` inside each member that is "
                    "a model"
                )
            if isinstance(inner, Config):
                raise ValueError("the inner teacher is already cached; remove one `cached`")
            if isinstance(inner, none.Config | scripted.Config):
                raise ValueError(
                    f"{inner.type!r} scores without a model, so there is nothing to store; remove "
                    "`cached`"
                )
            is_scratch = isinstance(inner, ModelConfig) and isinstance(inner.model, ScratchConfig)
            if is_scratch and self.folder is not None:
                raise ValueError(
                    "folder: a model made from scratch differs in every run; leave folder out, and "
                    "its answers are stored in the run's folder"
                )
        return self

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the inner teacher."""
        return self.teacher.capabilities()


def _explain_self(config: SelfConfig) -> str:
    if config.weights == "frozen":
        return (
            "`self` is not cached; name the student's model as {type: model, model: ...}, which "
            "answers the same"
        )
    return (
        f"a `self` teacher with {config.weights} weights follows the student, so its answers "
        "change; remove `cached`"
    )


@dataclass(slots=True)
class CacheStats:
    """The counts of a teacher: `requests`, `hits` in the store, and `left_out` without room."""

    requests: int = 0
    hits: int = 0
    left_out: int = 0


class CachingClient(WrappedClient):
    """A client that scores each completion once; see `practicum.ports.SamplingClient`.

    The key of an answer covers all that it depends on: the model, the prompt's tokens as the model
    reads them, the completion's tokens, and the signal. An answer is rounded to its stored form
    even if it is not stored. Samples are not stored.
    """

    # A call's new answers are stored all or none. So when a resumed run repeats a call, it finds
    # all answers or none, and the model reads the same batch as the first time.

    def __init__(self, bare: SamplingClient, open_scores: "Callable[[], ModelScores]") -> None:
        super().__init__(bare)
        self.counts = CacheStats()
        self._open_scores = open_scores
        self._model_scores: ModelScores | None = None
        self._head: HeadLike | None = None
        self._device = torch.device("cpu")
        self._has_warned = False

    @property
    def scores(self) -> ScoreStore | None:
        """The store; None before the first request, and if nothing is stored."""
        return None if self._model_scores is None else self._model_scores.scores

    def describe(self) -> str:
        """Return one line on the hits and the bytes per token."""
        counts, scores = self.counts, self.scores
        hits = f"{counts.hits} of {counts.requests} completions were scored before"
        if scores is None or not scores.tokens:
            return hits
        left_out = f", {counts.left_out} did not fit" if counts.left_out else ""
        bytes_per_token = scores.size / scores.tokens
        return f"{hits}{left_out}; {bytes_per_token:.0f} bytes per token in {scores.folder}"

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score completions, or read their stored scores.

        Stored float32 hidden states are rounded to float16, with an exponent for each token.
        """
        if not requests:
            return []
        # Opened at the first request, because a fingerprint reads all weights of the model.
        if self._model_scores is None:
            self._model_scores = self._open_scores()
        if self._model_scores.scores is not None:
            self._model_scores.scores.refresh()
        forms = _list_forms(signal)
        keys = [
            tuple(self._model_scores.build_key(request, form) for form in forms)
            for request in requests
        ]
        # Equal completions of one call are scored once, and count as one stored answer.
        unique = dict(zip(keys, requests, strict=True))
        entries = {key: entry for key in unique if (entry := self._look_up(key)) is not None}
        self.counts.requests += len(keys)
        self.counts.hits += sum(key in entries for key in keys)
        missing = {key: request for key, request in unique.items() if key not in entries}
        if missing:
            entries |= self._score_missing(missing, signal)
        if self._head is None and any("hidden" in entry for entry in entries.values()):
            self._fetch_head(requests[0])
        return [self._build_signal(entries[key]) for key in keys]

    def _look_up(self, keys: tuple[bytes, ...]) -> Entry | None:
        """Return the answer of the first key that the store has."""
        scores = self.scores
        if scores is None:
            return None
        return next((scores.read(key) for key in keys if key in scores), None)

    def _score_missing(
        self, missing: Mapping[tuple[bytes, ...], ScoreRequest], signal: Signal
    ) -> dict[tuple[bytes, ...], Entry]:
        """Return the model's answers as stored; answers of other processes take priority."""
        answers = self.bare.score(list(missing.values()), signal)
        new = {keys: _build_entry(answer) for keys, answer in zip(missing, answers, strict=True)}
        for request, entry in zip(missing.values(), new.values(), strict=True):
            _check(request, entry, next(iter(new.values())))
        states = answers[0].states
        if answers[0].head is not None and states is not None and self._head is None:
            self._head, self._device = answers[0].head, states.device
        scores = self.scores
        if scores is None or not all(map(_is_finite, new.values())):
            return new
        # Hidden states answer every form, so they get the key of the widest one.
        key = {keys: keys[0] if "hidden" in entry else keys[-1] for keys, entry in new.items()}
        stored_before = scores.keep({key[keys]: entry for keys, entry in new.items()})
        self.counts.left_out += sum(key[keys] not in scores for keys in new)
        if scores.is_full and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"{scores.folder} is full ({scores.size / _MIB:.1f} MiB kept), so no more of the "
                "teacher's answers are kept; what is there is used"
            )
        return {
            keys: scores.read(key[keys]) if key[keys] in stored_before else entry
            for keys, entry in new.items()
        }

    def _fetch_head(self, request: ScoreRequest) -> None:
        """Get the head and its device from an answer for one token."""
        # Only needed if the store had all answers so far, so that the model was never called.
        (answer,) = self.bare.score(
            [ScoreRequest(request.prompt_tokens[-1:], request.tokens[:1])], Full()
        )
        states = answer.states
        if states is not None:
            self._head, self._device = answer.head, states.device

    def _build_signal(self, entry: Entry) -> TeacherSignal:
        """Return an entry's signal: hidden states on the model's device, all else on the CPU."""
        ids = entry.get("topk_ids")
        hidden = entry.get("hidden")
        if hidden is not None and "exponents" in entry:
            hidden = restore_states(hidden, entry["exponents"])
        return TeacherSignal(
            logprobs=entry.get("logprobs"),
            topk_ids=None if ids is None else ids.long(),
            topk_logprobs=entry.get("topk_logprobs"),
            hidden=None if hidden is None else hidden.to(self._device),
            head=None if hidden is None else self._head,
        )


@dataclass(frozen=True, slots=True)
class ModelScores:
    """The fingerprint of a model, and the store of its answers, None if nothing is stored."""

    fingerprint: str
    scores: ScoreStore | None

    def build_key(self, request: ScoreRequest, form: str) -> bytes:
        """Return the SHA-256 of everything that an answer depends on."""
        prompt, tokens = array("q", request.prompt_tokens), array("q", request.tokens)
        digest = hashlib.sha256(f"{self.fingerprint} {form} {len(prompt)} ".encode())
        digest.update(prompt.tobytes() + tokens.tobytes())
        if request.candidates is not None:
            # With the width, so that [4, 3] and [3, 4] candidates of the same ids do not collide.
            digest.update(f" {request.candidates.shape[1]} ".encode())
            digest.update(array("q", request.candidates.flatten().tolist()).tobytes())
        return digest.digest()


def scale_states(hidden: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T D"], Int8[Tensor, " T"]]:
    """Return float16 hidden states, each token's scaled by a power of 2, and the exponents.

    The largest entry of a token is scaled below 2^15, so no entry overflows. The relative error is
    float16's (2^-11) for entries down to 2^-29 of the largest.
    """
    largest = (
        hidden.float().abs().amax(dim=-1) if hidden.shape[-1] else hidden.new_zeros(len(hidden))
    )
    exponents = _HIGHEST - torch.frexp(largest).exponent
    exponents = exponents.where(torch.isfinite(largest), 0).clamp(_LEAST_SHIFT, _LARGEST_SHIFT)
    return (hidden.float() * _compute_power(exponents)).half(), exponents.to(torch.int8)


def restore_states(
    hidden: Float[Tensor, "T D"], exponents: Int8[Tensor, " T"]
) -> Float[Tensor, "T D"]:
    """Return the float32 hidden states from the result of `scaled`; powers of 2 are exact."""
    return hidden.float() * _compute_power(-exponents.int())


def _compute_power(exponents: Tensor) -> Tensor:
    """Return 2^exponent as a column of float32."""
    # From the bits of a float32 number, because a power function may round.
    return ((exponents.int() + 127) << 23).view(torch.float32)[:, None]


def _build_entry(answer: TeacherSignal) -> Entry:
    """Return an answer as stored, with hidden states in 16 bits: float32 ones scaled to float16.

    The widest numbers come first.
    """
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
        entry["hidden"], entry["exponents"] = scale_states(states)
    return {name: tensor.cpu() for name, tensor in entry.items()}


def _check(request: ScoreRequest, entry: Entry, first: Entry) -> None:
    """Raise TeacherError if an answer does not fit its tokens or the first answer of its call."""
    if not entry or any(len(tensor) != len(request.tokens) for tensor in entry.values()):
        raise TeacherError(
            f"the model's answer does not cover the {len(request.tokens)} tokens it was asked "
            "about; score exactly the given tokens, or remove `cached`"
        )
    form = [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in entry.items()]
    if form != [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in first.items()]:
        raise TeacherError(
            "the model answers one call in several forms, which cannot be stored; remove `cached`"
        )


def _is_finite(entry: Entry) -> bool:
    # A temporary fault must not be stored permanently.
    return all(bool(torch.isfinite(tensor).all()) for tensor in entry.values())


def _list_forms(signal: Signal) -> tuple[str, ...]:
    """Return the forms that answer a signal, best first; `full` answers any with candidates."""
    if signal.candidates:
        return "full", f"topk({signal.candidates}, {signal.chooser})"
    return (signal.name,)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the inner teacher with a caching client; without a folder it only rounds."""
    folder = context.scores_dir
    if config.folder is not None:
        folder = context.base_dir / config.folder.expanduser()
    if context.is_dry_run:
        folder = None
    clients: list[CachingClient] = []

    def keep(client: SamplingClient, name: Callable[[Path], str]) -> SamplingClient:
        def open_scores() -> ModelScores:
            if folder is None:
                return ModelScores("", None)
            fingerprint = name(folder)
            store = ScoreStore(folder / fingerprint, int(config.max_mib * _MIB))
            return ModelScores(fingerprint, store)

        clients.append(CachingClient(client, open_scores))
        return clients[-1]

    teacher = replace(context, wrap_client=keep).build(config.teacher)
    if len(clients) != 1:
        raise RecipeError(
            f"cached: the teacher inside loads {len(clients)} models, and the answers of exactly "
            "one are kept; put `cached` around each model by itself"
        )
    context.after_training.append(lambda: log.info(clients[0].describe()))
    return teacher
