"""Speculative decoding: a drafter proposes tokens, and one call of the target verifies all of them.

The text has exactly the distribution of the target's own samples. With `verify: residual`, a draft
is accepted with probability min(1, p / q) (arXiv 2211.17192). With `verify: shared`, the target
samples each token with the random numbers of its place in the text, and a draft is accepted if it
is that token: the text is then the target's own text, for a chain and for a tree of drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from practicum.backends.local.decode_batch import open_draft_batch
from practicum.backends.local.drawing import (
    draw_exponentials,
    open_random_stream,
    open_request_stream,
    sample_by_exponential_race,
    sample_tokens,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.native.product import pack_product
from practicum.backends.local.prepared import PrepackedMaps
from practicum.backends.local.sampler import LocalSampler, compact_rows
from practicum.core import abandon
from practicum.core.randomness import seed_of
from practicum.functional.chunked import chunks
from practicum.functional.speculative import verify
from practicum.functional.truncation import sampling_logprobs
from practicum.models.config import DrafterConfig
from practicum.ports.drafters import DraftModel, KeysAndValues, embed
from practicum.text import stop_check
from practicum.types import DraftRound, Sample, SampleRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSampler(LocalSampler):
    """Write the target's text with a drafter; scores are the target's."""

    drafter: DraftModel
    config: DrafterConfig
    most_texts: int | None = None
    """The most texts of a call that are sampled with drafts, if none is continued; None: all."""

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, in order; drafted completions have their rounds."""
        most = self.most_texts
        if most is not None and (self.kept is not None or len(requests) > most):
            return LocalSampler.sample(self, requests, params)
        samples: list[Sample] = []
        for part in chunks(len(requests), self.batch_size):
            samples += _DraftLoop(self, requests[part], params).run()
        return samples


@dataclass(slots=True)
class _Text:
    """A completion in progress.

    `noise` are the random numbers of its next places, drawn when a place is first sampled.
    """

    number: int
    prompt: tuple[int, ...]
    stream: torch.Generator
    second: torch.Generator
    tokens: list[int] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)
    noise: list[Tensor] = field(default_factory=list)
    rounds: list[DraftRound] = field(default_factory=list)
    stopped: bool = False

    def read_noise(self, ahead: int, vocabulary: int) -> Float[Tensor, " N"]:
        """Return the random numbers of the place `ahead` of the next one."""
        while len(self.noise) <= ahead:
            self.noise.append(draw_exponentials([self.stream], vocabulary)[0])
        return self.noise[ahead]


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The drafts of a round: a tree of N tokens per text, parents first.

    `parents` are the indices of earlier drafts, -1 for the text itself; `depths` are per draft.
    `logprobs` are the distributions that a chain was sampled from, over the target's vocabulary, if
    verification needs them.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, " N"]
    logprobs: Float[Tensor, "B N V"] | None

    def find_ancestors(self) -> Bool[Tensor, "B M M"]:
        """Return which of the text's last token and the drafts each of them follows, M = N + 1."""
        batch, count = self.tokens.shape
        mask = torch.eye(count + 1, dtype=torch.bool, device=self.tokens.device)
        mask = mask.expand(batch, -1, -1).clone()
        mask[:, :, 0] = True
        rows = torch.arange(batch, device=mask.device)
        for number in range(count):
            mask[:, number + 1] |= mask[rows, self.parents[:, number] + 1]
        return mask


class _DraftLoop:
    """Decode some texts together; a text that ends leaves the batch."""

    def __init__(
        self, sampler: DraftingSampler, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> None:
        self.sampler, self.params = sampler, params
        self.model: LanguageModel = sampler.language_model
        self.drafter, self.config = sampler.drafter, sampler.config
        self.library, head = sampler.open_library(), self.drafter.head
        pack = None if self.library is None else partial(pack_product, self.library)
        self.maps = PrepackedMaps(self.drafter, head, params.max_new_tokens, pack)
        self.is_shared = self.config.verify == "shared"
        self.check = stop_check(params, self.model.tokenizer)
        vocabulary = self.model.vocab_size
        self.texts = [
            _Text(
                number,
                request.prompt_tokens,
                open_request_stream(request, vocabulary),
                open_random_stream(seed_of(request.seed, "drafts")),
            )
            for number, request in enumerate(requests)
        ]
        self.finished: dict[int, _Text] = {}
        self.batch = open_draft_batch(
            self.model,
            [request.prompt_tokens for request in requests],
            params.max_new_tokens,
            self.drafter.layers,
            self.config.depth * self.config.width,
        )
        self.memory: KeysAndValues | None = None
        self.remembered = torch.zeros(len(requests), 0, dtype=torch.bool, device=self.model.device)
        """True where the drafter's memory holds a row of the text."""

    def run(self) -> list[Sample]:
        """Decode until all texts have ended."""
        count = len(self.texts)
        if count and self.params.max_new_tokens:
            rows, features = self._read_prompts()
            while self.texts:
                abandon.check()
                with self.maps.use():
                    drafts = self._draft(rows, features)
                rows, features = self._verify(drafts)
        else:
            self.finished = {text.number: text for text in self.texts}
        return [self._build_sample(self.finished[number]) for number in range(count)]

    # The target.

    def _read_prompts(self) -> tuple[Bool[Tensor, "b L"], Float[Tensor, "b L F"]]:
        """Read all prompts and sample the first tokens; return the prompts' rows."""
        self.batch.admit(len(self.texts))
        features = pad_sequence(
            [rows.float() for rows in self.batch.take_features()], batch_first=True
        )
        lengths = torch.tensor([[len(text.prompt)] for text in self.texts], device=features.device)
        rows = torch.arange(features.shape[1], device=features.device) < lengths
        results = self._sample(self.batch.logits(), range(len(self.texts)))
        for text, token, sampling, policy in zip(self.texts, *results, strict=True):
            self._append(text, int(token), float(sampling), float(policy))
        return self._drop_finished(rows, features)

    def _verify(self, drafts: _Drafts) -> tuple[Bool[Tensor, "b L"], Float[Tensor, "b L F"]]:
        """Let the target read the drafts; append what it accepts, and return the new rows."""
        device = drafts.tokens.device
        last = torch.tensor([[text.tokens[-1]] for text in self.texts], device=device)
        depths = torch.cat([torch.zeros(1, dtype=torch.long), drafts.depths + 1])
        ids = torch.cat([last, drafts.tokens], dim=1)
        logits, features = self.batch.read_tree(ids, depths, drafts.find_ancestors())
        walk = self._walk_samples if self.is_shared else self._walk_residual
        paths = walk(drafts, logits)
        for row, (tokens, path) in enumerate(zip(ids.tolist(), paths, strict=True)):
            self.batch.append_path(row, tokens, path)
        # The rows of the accepted tokens, to the left.
        width = max(map(len, paths))
        order = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=device)
        rows = torch.arange(width, device=device) < torch.tensor(
            [[len(path)] for path in paths], device=device
        )
        features = features.float()
        features = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1]))
        return self._drop_finished(rows, features)

    def _walk_samples(self, drafts: _Drafts, logits: Float[Tensor, "B M V"]) -> list[list[int]]:
        """Sample the target's tokens, and follow the tree while they are drafts.

        Returns the nodes on the way, the text's last token (0) first.
        """
        parents, proposed = drafts.parents.tolist(), drafts.tokens.tolist()
        paths = [[0] for _ in self.texts]
        starts = [len(text.tokens) for text in self.texts]
        active = list(range(len(self.texts)))
        while active:
            nodes = [paths[row][-1] for row in active]
            results = self._sample(logits[active, nodes], active)
            going = []
            for row, node, token, sampling, policy in zip(active, nodes, *results, strict=True):
                text = self.texts[row]
                self._append(text, int(token), float(sampling), float(policy))
                pairs = zip(parents[row], proposed[row], strict=True)
                children = [
                    number + 1
                    for number, pair in enumerate(pairs)
                    if pair == (node - 1, int(token))
                ]
                if children and not self._has_ended(text):
                    paths[row].append(children[0])
                    going.append(row)
                else:
                    self._add_round(text, starts[row], drafts, row, paths[row], bool(children))
            active = going
        return paths

    def _walk_residual(self, drafts: _Drafts, logits: Float[Tensor, "B M V"]) -> list[list[int]]:
        """Accept a prefix of each chain with probability min(1, p / q), and replace the next token."""
        assert drafts.logprobs is not None, "a chain is sampled from its distributions"
        paths = []
        for row, text in enumerate(self.texts):
            policy = torch.log_softmax(logits[row], dim=-1).cpu()
            target = sampling_logprobs(self._ban(policy), self.params)
            proposed = drafts.tokens[row].cpu()
            uniforms = torch.rand(len(proposed), generator=text.second, dtype=torch.float64)
            accepted, after = verify(drafts.logprobs[row].cpu(), target, proposed, uniforms)
            final = int(torch.multinomial(after.exp(), 1, generator=text.second))
            start, path = len(text.tokens), [0]
            for node, token in enumerate([*proposed.tolist()[:accepted], final]):
                numbers = target[node, token], policy[node, token]
                self._append(text, token, *map(float, numbers))
                if self._has_ended(text):
                    break
                path = list(range(node + 1))
            count = min(accepted, len(text.tokens) - start)
            text.rounds.append(DraftRound(start, tuple(proposed.tolist()), count))
            paths.append(path)
        return paths

    def _add_round(
        self,
        text: _Text,
        start: int,
        drafts: _Drafts,
        row: int,
        path: Sequence[int],
        ends_accepted: bool,
    ) -> None:
        """Record a round: of a tree, the accepted drafts and the first draft after them."""
        parents, proposed = drafts.parents[row].tolist(), drafts.tokens[row].tolist()
        tokens = [proposed[node - 1] for node in path[1:]]
        accepted, node = len(tokens) + ends_accepted, path[-1] - 1
        while (child := next((n for n, up in enumerate(parents) if up == node), None)) is not None:
            tokens.append(proposed[child])
            node = child
        if ends_accepted:
            tokens[len(path) - 1] = text.tokens[-1]
        text.rounds.append(DraftRound(start, tuple(tokens), accepted))

    # The drafter.

    def _draft(self, rows: Bool[Tensor, "B L"], features: Float[Tensor, "B L F"]) -> _Drafts:
        """Add new rows to the drafter's memory, and draft from the last one."""
        device, target, drafter = self.model.device, self.model.model, self.drafter
        counts, length = rows.sum(dim=1), rows.shape[1]
        ends = torch.tensor([len(t.prompt) + len(t.tokens) - 1 for t in self.texts], device=device)
        places = (ends - counts)[:, None] + torch.arange(length, device=device)
        texts = [[*text.prompt, *text.tokens] for text in self.texts]
        firsts = (ends - counts).tolist()
        following = [
            [*text[first + 1 : first + 1 + length], *[0] * length][:length]
            for text, first in zip(texts, firsts, strict=True)
        ]
        tokens = torch.tensor(following, device=device)
        hidden = drafter.fuse(features)
        queries, pair = drafter.read(embed(target, tokens), hidden, places.clamp(min=0))
        before = self.remembered
        self.remembered = torch.cat([before, rows], dim=1)
        old = self.memory
        self.memory = pair if old is None else _join(old, pair)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        sees = torch.cat([before[:, None].expand(-1, length, -1), rows[:, None] & causal], dim=-1)
        states = drafter.attend(hidden, queries, self.memory, sees)
        state = states[torch.arange(len(ends), device=device), counts - 1][:, None]
        return self._grow(state, ends - 1)

    def _grow(self, state: Float[Tensor, "B 1 D"], places: Int[Tensor, " B"]) -> _Drafts:
        """Draft level by level from the state of each text's last row."""
        drafter, width, batch = self.drafter, self.config.width, len(state)
        assert self.memory is not None, "rows are read before they are continued"
        total = state.new_zeros(batch, 1)
        base = torch.full((batch, 1), -1, device=state.device)
        path: list[KeysAndValues] = []
        levels, parents, logprobs = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth in range(self.config.depth):
            full = self._spread(self.maps.head.logprobs(drafter.finish(state)))
            if width == 1:
                token, distribution = self._sample_draft(full[:, 0], depth)
                tokens, above = token[:, None], torch.zeros_like(token)[:, None]
                if distribution is not None:
                    logprobs.append(distribution)
            else:
                sums = (total[..., None] + full).flatten(1)
                total, best = sums.topk(width, dim=-1)
                above, tokens = best // full.shape[-1], best % full.shape[-1]
            levels.append(tokens)
            parents.append(base.gather(1, above))
            base = torch.arange(tokens.shape[1], device=state.device).expand_as(tokens)
            base = base + sum(level.shape[1] for level in levels[:-1])
            if depth + 1 == self.config.depth:
                break
            state = state.gather(1, above[..., None].expand(-1, -1, state.shape[-1]))
            path = [_select(pair, above) for pair in path]
            spots = (places + depth + 1)[:, None].expand_as(tokens)
            queries, pair = drafter.read(embed(self.model.model, tokens), state, spots)
            path.append(pair)
            sees = self.remembered[:, None].expand(-1, tokens.shape[1], -1)
            state = drafter.attend(state, queries, self.memory, sees, path)
        depths = [torch.full((level.shape[1],), number) for number, level in enumerate(levels)]
        return _Drafts(
            torch.cat(levels, dim=1),
            torch.cat(parents, dim=1),
            torch.cat(depths),
            torch.stack(logprobs, dim=1) if logprobs else None,
        )

    def _spread(self, logprobs: Float[Tensor, "B W v"]) -> Float[Tensor, "B W V"]:
        """Return draft distributions over the target's vocabulary."""
        full = logprobs.new_full((*logprobs.shape[:-1], self.model.vocab_size), -torch.inf)
        full[..., self.drafter.vocabulary.ids.to(full.device)] = logprobs
        return full

    def _sample_draft(
        self, full: Float[Tensor, "B V"], depth: int
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
        """Sample one draft per text, with the noise of its place if that is shared.

        Returns the tokens, and the distributions that verification needs unless the noise is shared.
        """
        vocabulary = self.model.vocab_size
        if self.is_shared:
            noise = [text.read_noise(depth, vocabulary) for text in self.texts]
            stacked = torch.stack(noise).to(full.device)
            return sample_tokens(full, self.params, stacked, self.library)[0], None
        distribution = sampling_logprobs(self._ban(full), self.params)
        streams = [text.second for text in self.texts]
        stacked = draw_exponentials(streams, vocabulary).to(full.device)
        return sample_by_exponential_race(distribution, stacked)[0], distribution

    # Both.

    def _ban(self, logprobs: Float[Tensor, "*s V"]) -> Float[Tensor, "*s V"]:
        """Return distributions without the tokens that may not be sampled."""
        if not self.params.banned_ids:
            return logprobs
        banned = torch.tensor(sorted(self.params.banned_ids), device=logprobs.device)
        return torch.log_softmax(logprobs.index_fill(-1, banned, -torch.inf), dim=-1)

    def _sample(
        self, logits: Float[Tensor, "B V"], rows: Sequence[int]
    ) -> tuple[list[int], list[float], list[float]]:
        """Sample the target's next tokens of some texts with the noise of their places."""
        vocabulary = self.model.vocab_size
        noise = [self.texts[row].read_noise(0, vocabulary) for row in rows]
        tokens, sampling, policy = sample_tokens(
            logits, self.params, torch.stack(noise).to(logits.device), self.library
        )
        return tokens.tolist(), sampling.tolist(), policy.tolist()

    def _append(self, text: _Text, token: int, sampling: float, policy: float) -> None:
        text.tokens.append(token)
        del text.noise[:1]
        text.sampling.append(sampling)
        text.policy.append(policy)
        text.stopped = self.check([text.tokens])[0]

    def _has_ended(self, text: _Text) -> bool:
        return text.stopped or len(text.tokens) >= self.params.max_new_tokens

    def _drop_finished(
        self, rows: Bool[Tensor, "B L"], features: Float[Tensor, "B L F"]
    ) -> tuple[Bool[Tensor, "b L"], Float[Tensor, "b L F"]]:
        """Remove the texts that have ended from the batch."""
        going = [row for row, text in enumerate(self.texts) if not self._has_ended(text)]
        self.finished |= {text.number: text for text in self.texts if self._has_ended(text)}
        if len(going) == len(self.texts):
            return rows, features
        keep = compact_rows(going)
        self.batch.keep_rows(keep)
        self.texts = [self.texts[row] for row in keep]
        index = torch.tensor(keep, dtype=torch.long, device=rows.device)
        self.remembered = self.remembered[index]
        if self.memory is not None:
            self.memory = self.memory[0][index], self.memory[1][index]
        return rows[index], features[index]

    def _build_sample(self, text: _Text) -> Sample:
        return Sample(
            tokens=torch.tensor(text.tokens, dtype=torch.long),
            sampling_logprobs=torch.tensor(text.sampling, dtype=torch.float32),
            policy_logprobs=torch.tensor(text.policy, dtype=torch.float32),
            stop_reason="stop" if text.stopped else "length",
            rounds=tuple(text.rounds),
        )


def _join(first: KeysAndValues, second: KeysAndValues) -> KeysAndValues:
    """Return the rows of both."""
    return torch.cat([first[0], second[0]], dim=2), torch.cat([first[1], second[1]], dim=2)


def _select(pair: KeysAndValues, rows: Int[Tensor, "B W"]) -> KeysAndValues:
    """Return some rows of keys and values."""
    keys, values = (
        part.gather(2, rows[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[-1]))
        for part in pair
    )
    return keys, values
