"""Speculative answers have the target's law for any drafter, by enumeration of every decision of the sampler."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from backends.tiny import tiny
from pydantic import ValidationError

from practicum.backends.local import sampler
from practicum.backends.local.sampler import LocalSampler
from practicum.functional.truncation import sampling_logprobs
from practicum.methods.editors.speculative import Config, SpeculativeRule
from practicum.ports import MixedRequest
from practicum.types import AUTHORS, SamplingParams

from .laws import SETTINGS, assert_same_text

V, STOP, LONGEST = 3, 2, 3
TEACHER = AUTHORS.index("teacher")


class Scripted(SpeculativeRule):
    """Accept or reject by a script: `uniforms[text][n]` is the text's n-th random number."""

    def __init__(self, gamma, uniforms, lenience):
        super().__init__(gamma, [0] * len(uniforms), lenience)
        self.uniforms = uniforms
        self.place = defaultdict(int)

    def draw_uniforms(self, texts):
        values = []
        for text in texts:
            values.append(self.uniforms[text][min(self.place[text], LONGEST - 1)])
            self.place[text] += 1
        return torch.tensor(values)


class TableBatch:
    """A decode batch of a model that is a table from texts to logits; all rows begin together."""

    supports_refill = True

    def __init__(self, table, count):
        self.table, self.left, self.texts = table, count, []

    def admit(self, max_rows):
        admitted = min(max_rows, self.left)
        self.left -= admitted
        self.texts += [()] * admitted
        return admitted

    def logits(self):
        return torch.stack([self.table[text] for text in self.texts])

    def advance(self, tokens, keep):
        self.texts = [(*self.texts[row], int(tokens[row])) for row in keep]


def make_table(seed):
    generator = torch.Generator().manual_seed(seed)
    texts = [t for n in range(LONGEST) for t in itertools.product(range(V), repeat=n)]
    return {text: 2 * torch.randn(V, generator=generator) for text in texts}


def law(table, text, params):
    """Return the sampling distribution after a text as probabilities, in double."""
    logprobs = sampling_logprobs(table[text].double().log_softmax(-1)[None], params)[0]
    return logprobs.exp().tolist()


def mix_laws(draft, target, lenience):
    """Return the law of a drafted token: the target's if the lenience is 1."""
    kept = [min(s, t / lenience) for s, t in zip(draft, target, strict=True)]
    rest = [max(t - lenience * s, 0.0) for s, t in zip(draft, target, strict=True)]
    scale = (1 - sum(kept)) / sum(rest) if sum(rest) > 1e-12 else 0.0
    return [share + scale * more for share, more in zip(kept, rest, strict=True)]


def enumerate_decisions(draft, target, params, gamma, lenience):
    """Yield every course of the sampler: its decisions, the text, its authors and its probability.

    A decision is (draft, accepted, replacement). The probabilities are worked out from Leviathan et al., not by the library.
    """

    def go(text, authors, decisions, probability, drafts):
        if len(text) == LONGEST or STOP in text:
            yield decisions, text, authors, probability
            return
        s, t = law(draft, text, params), law(target, text, params)
        if drafts == gamma:
            for v in range(V):
                if t[v]:
                    step = [*decisions, (None, False, v)]
                    yield from go((*text, v), [*authors, True], step, probability * t[v], 0)
            return
        rest = [max(t[v] - lenience * s[v], 0.0) for v in range(V)]
        for v in range(V):
            if not s[v]:
                continue
            chance = min(1.0, t[v] / (lenience * s[v]))
            if chance > 1e-12:
                step = [*decisions, (v, True, 0)]
                more = probability * s[v] * chance
                yield from go((*text, v), [*authors, False], step, more, drafts + 1)
            for w in range(V):
                if chance < 1 - 1e-6 and rest[w] > 1e-9:
                    step = [*decisions, (v, False, w)]
                    more = probability * s[v] * (1 - chance) * rest[w] / sum(rest)
                    yield from go((*text, w), [*authors, True], step, more, 0)

    return list(go((), [], [], 1.0, 0))


@pytest.mark.parametrize(("gamma", "lenience"), [(0, 1.0), (1, 1.0), (2, 1.0), (4, 1.0), (4, 0.4)])
@pytest.mark.parametrize("params", [*SETTINGS[:3], {"top_k": 2}], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_has_exactly_the_targets_law(monkeypatch, gamma, lenience, params, seed):
    settings = SamplingParams(LONGEST, stop_ids=frozenset({STOP}), **params)
    draft, target = make_table(seed), make_table(seed + 10)
    courses = enumerate_decisions(draft, target, settings, gamma, lenience)
    uniforms = [
        [0.0 if accepted else 1.0 - 1e-7 for _, accepted, _ in decisions] + [0.0] * LONGEST
        for decisions, *_ in courses
    ]
    places = defaultdict(int)

    def script(streams, vocabulary):
        """Return noise by which the wanted token wins the race: the draft's, or the replacement's."""
        noise = torch.ones(len(streams), 1 + 64, dtype=torch.float64)
        for row, stream in enumerate(streams):
            number, is_teacher = divmod(stream.initial_seed(), 2)
            decisions = courses[number][0]
            wanted = decisions[min(places[stream], len(decisions) - 1)][2 if is_teacher else 0]
            places[stream] += 1
            noise[row, 1 + (wanted or 0)] = 1e-30
        return noise

    monkeypatch.setattr(sampler, "draw_exponentials", script)
    loop = sampler._DecodeLoop(
        TableBatch(draft, len(courses)),
        [sampler.open_random_stream(2 * number) for number in range(len(courses))],
        settings,
        lambda texts: [text[-1] == STOP for text in texts],
        partner=sampler._Partner(
            TableBatch(target, len(courses)),
            [sampler.open_random_stream(2 * number + 1) for number in range(len(courses))],
            Scripted(gamma, uniforms, lenience),
        ),
    )
    samples = sampler.run_to_end(loop, len(courses), 50)

    def expect(text):
        """Return the probability of a text; with lenience all tokens are drafted."""
        pairs = [
            [law(table, text[:n], settings) for table in (draft, target)] for n in range(len(text))
        ]
        return math.prod(mix_laws(*pair, lenience)[v] for pair, v in zip(pairs, text, strict=True))

    written = defaultdict(float)
    for (_, text, authors, probability), sample in zip(courses, samples, strict=True):
        assert tuple(sample.tokens.tolist()) == text
        assert (sample.authors == TEACHER).tolist() == authors
        written[text] += probability
        assert sample.sampling_logprobs.sum().exp() == pytest.approx(expect(text), rel=1e-4)
    assert len({len(text) for text in written}) > 1, "the texts have several lengths"
    for text, probability in written.items():
        assert probability == pytest.approx(expect(text), abs=1e-9)
    assert sum(written.values()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.cpu_only
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_with_shared_random_numbers_it_is_the_teachers_own_text(write, params):
    """Compare bytes. Only the authors tell where the student drafted the same token."""
    ours = write("speculative(4, coupling=shared)", **params)
    theirs = write("teacher", **params)
    accepted = [~rollout.mark_tokens_by("teacher") for rollout in ours]
    assert any(mask.any() for mask in accepted) and not all(mask.all() for mask in accepted)
    assert_same_text([replace(one, source="teacher", authors=None) for one in ours], theirs)


def test_lenience_needs_rejection():
    with pytest.raises(ValidationError, match="accept only equal tokens; leave it out"):
        Config(coupling="shared", lenience=0.5)


@pytest.mark.cpu_only
def test_without_drafts_the_teacher_writes(write):
    for coupling in ("shared", "rejection"):
        assert_same_text(write(f"speculative(0, coupling={coupling})"), write("teacher"))


def test_rejection_accepts_one_less_the_total_variation_and_shared_fewer(write, both):
    """Over many answers: the best coupling accepts sum(min(S, T)), and no coupling more."""
    shares = {}
    for coupling in ("rejection", "shared"):
        count = expected = accepted = 0.0
        for seed in range(12):
            for rollout in write(f"speculative(1000, coupling={coupling})", seed=seed):
                student, teacher = both(rollout)
                expected += float(torch.minimum(student.exp(), teacher.exp()).sum())
                accepted += float((~rollout.mark_tokens_by("teacher")).sum())
                count += len(rollout.tokens)
        shares[coupling] = accepted / count
        error = 3 * math.sqrt(0.25 / count)
        assert shares[coupling] <= expected / count + error
        if coupling == "rejection":
            assert shares[coupling] == pytest.approx(expected / count, abs=error)
    assert shares["shared"] < shares["rejection"] + 0.1


def test_the_drafts_between_two_tokens_of_the_target_are_at_most_gamma(write):
    rollouts = write("speculative(2)") + write("speculative(2)", seed=1)
    for rollout in rollouts:
        run = 0
        for is_teachers in rollout.mark_tokens_by("teacher").tolist():
            run = 0 if is_teachers else run + 1
            assert run <= 2
    metrics = Config.measure(rollouts)
    assert 1.0 < metrics["tokens_per_call"] <= 3.0


def test_a_request_gets_the_same_text_in_any_company():
    student, teacher = LocalSampler(tiny(seed=1)), LocalSampler(tiny(seed=5))
    asked = [MixedRequest((3, 4, n), (5, n), n, n + 50) for n in range(6)]
    params = SamplingParams(10, stop_ids=frozenset({1}))

    def sample(requests, size=64):
        rule = SpeculativeRule(3, [request.seed for request in requests])
        client = LocalSampler(student.language_model, batch_size=size)
        return [s.tokens.tolist() for s in client.sample_mixed(requests, teacher, rule, params)]

    assert sample(asked) == sample(asked, 2) == [sample([one])[0] for one in asked]
