"""Sampling and scoring: exact log-probabilities, the same tokens in any batch, the right frequencies."""

import itertools
from dataclasses import replace

import pytest
import torch
from toy import in_check

from backends.places import SECOND, Current, count_transfers
from backends.tiny import ARCHITECTURES, VOCABULARY, random_tokens, tiny
from practicum.backends.local import sampler as local_sampler
from practicum.backends.local.device_limits import ON_CPU
from practicum.backends.local.drawing import (
    TokenReading,
    draw_exponentials,
    open_random_stream,
    sample_by_exponential_race,
    sampling_logprobs,
)
from practicum.backends.local.host_states import HostStates
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.costs.segments import FEWEST_SAVED_TOKENS
from practicum.objective import Full, Sampled, TopK
from practicum.ports import MixedRequest, MixtureRule, WeightUpdateRule
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

STOPS = frozenset({2, 17, 30, 41})
EXACT = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(params=in_check(ARCHITECTURES, "llama"))
def model(request):
    return tiny(request.param)


def requests(count: int = 7, shared: int = 0) -> list[SampleRequest]:
    """Return prompts of unequal lengths, one of them twice, all beginning with `shared` common tokens."""
    common = random_tokens(shared, 99)
    prompts = [common + random_tokens(3 + 5 * number % 13, number) for number in range(count)]
    prompts[-1] = prompts[0]
    return [SampleRequest(prompt, seed=100 + number) for number, prompt in enumerate(prompts)]


def logprobs_by_transformers(model, prompt, tokens):
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with (
        torch.no_grad(),
        torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.autocast),
    ):
        logits = model.model(input_ids=ids).logits[0, :, :VOCABULARY].cpu()
    return torch.log_softmax(logits.double(), dim=-1)[
        len(prompt) - 1 : len(prompt) + len(tokens) - 1
    ]


def same(first, second):
    return [sample.tokens.tolist() for sample in first] == [
        sample.tokens.tolist() for sample in second
    ]


@pytest.mark.float32
@torch.no_grad()
def test_body_and_head_are_the_model(model):
    ids = torch.tensor([random_tokens(40, 1), random_tokens(40, 2)], device=model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    split = model.head().logprobs(model.body(ids, mask))
    torch.testing.assert_close(
        split, torch.log_softmax(model.model(input_ids=ids).logits, dim=-1), **EXACT
    )
    model.check_split()


@pytest.mark.float32
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_no_hidden_state(model, side):
    tokens = random_tokens(20, 1)
    device = model.device
    ids = torch.tensor([tokens], device=device)
    alone = model.body(ids, torch.ones_like(ids, dtype=torch.bool))
    blank = (5,) * 11
    padded = (blank + tokens) if side == "left" else (tokens + blank)
    row = [False] * 11 + [True] * 20 if side == "left" else [True] * 20 + [False] * 11
    mask = torch.tensor([row], device=device)
    batch = torch.tensor([padded, random_tokens(31, 2)], device=device)
    hidden = model.body(batch, torch.cat([mask, torch.ones_like(mask)]))[:1]
    torch.testing.assert_close(hidden[:, 11:] if side == "left" else hidden[:, :20], alone, **EXACT)


@pytest.mark.float32
def test_logprobs_of_a_sample_are_those_of_the_model(model):
    params = SamplingParams(max_new_tokens=15, temperature=0.7, top_k=9, top_p=0.8, stop_ids=STOPS)
    for request, sample in zip(
        requests(), LocalSampler(model).sample(requests(), params), strict=True
    ):
        tokens = sample.tokens.tolist()
        policy = logprobs_by_transformers(model, request.prompt_tokens, tokens)
        expected = policy.gather(1, sample.tokens[:, None])[:, 0].float()
        torch.testing.assert_close(sample.policy_logprobs, expected, **EXACT)
        for place, token in enumerate(tokens):
            kept = slow_sampling_distribution(policy[place], params)
            assert sample.sampling_logprobs[place].item() == pytest.approx(kept[token], abs=1e-4)


def slow_sampling_distribution(logprobs, params):
    """Map token to log-probability, by sorting: temperature, then the top k, then the smallest set of mass top_p."""
    scaled = torch.softmax(logprobs.double() / params.temperature, dim=-1).tolist()
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(scaled[token] for token in order), 0.0, []
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += scaled[token]
    return {token: torch.tensor(scaled[token] / mass).log().item() for token in kept}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 1.0])
def test_the_sampling_distribution_equals_its_slow_twin(temperature, top_k, top_p):
    params = SamplingParams(1, temperature, top_p, top_k)
    policy = torch.log_softmax(
        2 * torch.randn(5, 13, generator=torch.Generator().manual_seed(3)), dim=-1
    )
    for row, found in zip(policy, sampling_logprobs(policy, params), strict=True):
        expected = torch.full((13,), -torch.inf)
        for token, logprob in slow_sampling_distribution(row, params).items():
            expected[token] = logprob
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_plain_sampling_is_from_the_policy_itself(model):
    for sample in LocalSampler(model).sample(requests(), SamplingParams(6)):
        assert torch.equal(sample.sampling_logprobs, sample.policy_logprobs)


@pytest.mark.float32
def test_greedy_equals_generate(model):
    for request in requests():
        (sample,) = LocalSampler(model).sample(
            [request], SamplingParams(12, temperature=0.0, stop_ids=frozenset({2}))
        )
        prompt = torch.tensor([request.prompt_tokens], device=model.device)
        whole = model.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert sample.tokens.tolist() == whole[0, prompt.shape[1] :].tolist()
        assert sample.sampling_logprobs.abs().max() == 0
        assert sample.policy_logprobs.max() < 0


@pytest.mark.float32
@pytest.mark.parametrize("shared", [0, 20])
def test_a_request_gets_the_same_tokens_in_any_company(model, shared):
    asked = requests(shared=shared)
    params = SamplingParams(12, stop_ids=STOPS)
    together = LocalSampler(model).sample(asked, params)
    alone = [LocalSampler(model).sample([request], params)[0] for request in asked]
    backwards = LocalSampler(model).sample(asked[::-1], params)[::-1]
    assert same(together, alone)
    assert same(together, backwards)
    assert same(together, LocalSampler(model, batch_size=3).sample(asked, params))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.policy_logprobs, other.policy_logprobs, **EXACT)


def test_the_seed_and_nothing_else_chooses_the_tokens(model):
    prompt = random_tokens(6, 1)
    params = SamplingParams(10)
    first = LocalSampler(model).sample([SampleRequest(prompt, 1), SampleRequest(prompt, 2)], params)
    torch.manual_seed(12345)
    second = LocalSampler(model).sample(
        [SampleRequest(prompt, 1), SampleRequest(prompt, 2)], params
    )
    assert same(first, second)
    assert not same(first[:1], first[1:])


def test_a_longer_limit_continues_the_same_tokens(model):
    short = LocalSampler(model).sample(requests(), SamplingParams(5))
    long = LocalSampler(model).sample(requests(), SamplingParams(11))
    assert [sample.tokens.tolist() for sample in short] == [
        sample.tokens[:5].tolist() for sample in long
    ]


def test_a_stop_token_is_the_last_one_and_only_there(model):
    samples = LocalSampler(model).sample(requests(), SamplingParams(30, stop_ids=STOPS))
    reasons = set()
    for sample in samples:
        stops = [token in STOPS for token in sample.tokens.tolist()]
        assert not any(stops[:-1])
        assert sample.stop_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(stops) == 30
        reasons.add(sample.stop_reason)
    assert "stop" in reasons


def test_a_stop_token_at_the_limit_is_a_stop(model):
    (free,) = LocalSampler(model).sample(requests()[:1], SamplingParams(4))
    stops = frozenset({int(free.tokens[3])} - set(free.tokens[:3].tolist()))
    (sample,) = LocalSampler(model).sample(requests()[:1], SamplingParams(4, stop_ids=stops))
    assert sample.tokens.tolist() == free.tokens.tolist()
    assert sample.stop_reason == ("stop" if stops else "length")


def test_no_requests_and_no_room_are_answered():
    sampler = LocalSampler(tiny())
    assert sampler.sample([], SamplingParams(3)) == []
    assert sampler.score([], Full()) == []
    (sample,) = sampler.sample(requests()[:1], SamplingParams(0))
    assert (len(sample.tokens), sample.stop_reason) == (0, "length")


@pytest.mark.float32
@pytest.mark.parametrize("shared", [0, 20])
def test_scoring_a_sample_gives_its_policy_logprobs(model, shared):
    asked = requests(shared=shared)
    samples = LocalSampler(model).sample(asked, SamplingParams(12, temperature=1.3, stop_ids=STOPS))
    scored = [
        ScoreRequest(request.prompt_tokens, tuple(sample.tokens.tolist()))
        for request, sample in zip(asked, samples, strict=True)
    ]
    sampler = LocalSampler(model, batch_size=4, chunk_tokens=5)
    rich = sampler.score(scored, Full())
    for sample, plain, full in zip(samples, sampler.score(scored, Sampled()), rich, strict=True):
        torch.testing.assert_close(plain.logprobs, sample.policy_logprobs, **EXACT)
        found = full.head.logprobs(full.hidden).cpu().gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(found, sample.policy_logprobs, **EXACT)
        assert not found.requires_grad


@pytest.mark.float32
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_shared_prefix_changes_nothing(architecture):
    model = tiny(architecture)
    asked = [
        ScoreRequest(request.prompt_tokens, (5, 6, 7))
        for request in requests(shared=FEWEST_SAVED_TOKENS + 3)
    ]
    together = LocalSampler(model).score(asked, Full())
    alone = [LocalSampler(model).score([request], Full())[0] for request in asked]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, **EXACT)


def test_equal_prompts_may_share_all_but_their_last_token():
    model, prompt = tiny(), random_tokens(FEWEST_SAVED_TOKENS + 1, 1)
    asked = [
        ScoreRequest(prompt, (5,)),
        ScoreRequest(prompt, (5, 6)),
        ScoreRequest((*prompt, 5, 6), ()),
    ]
    together = LocalSampler(model).score(asked, Full())
    assert [signal.hidden.shape[0] for signal in together] == [1, 2, 0]
    for one, request in zip(together, asked, strict=True):
        torch.testing.assert_close(
            one.hidden, LocalSampler(model).score([request], Full())[0].hidden, **EXACT
        )


def test_a_sliding_window_shares_no_prefix():
    assert tiny("gemma3").window == 8
    assert tiny("llama").window is None
    assert tiny("qwen3").window is None


def test_sampling_and_scoring_ignore_dropout_and_leave_no_training_mode():
    model = tiny(dropout=0.5)
    request = ScoreRequest(random_tokens(6, 1), (5, 6, 7))
    model.model.train()
    first = LocalSampler(model).score([request], Sampled())[0].logprobs
    model.model.train()
    assert torch.equal(first, LocalSampler(model).score([request], Sampled())[0].logprobs)
    model.model.train()
    samples = LocalSampler(model).sample(requests(), SamplingParams(5))
    assert same(samples, LocalSampler(model).sample(requests(), SamplingParams(5)))


def test_frequencies_are_the_probabilities():
    """Chi-square over 4000 draws: 19 degrees of freedom, the 0.999 quantile is 43.8."""
    logprobs = torch.log_softmax(
        1.5 * torch.randn(20, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    draws = 4000
    noise = draw_exponentials([open_random_stream(seed) for seed in range(draws)], 20)
    counts = torch.bincount(
        sample_by_exponential_race(logprobs.expand(draws, -1), noise)[0], minlength=20
    )
    expected = draws * logprobs.exp()
    assert ((counts - expected).square() / expected).sum() < 43.8


def test_no_token_of_probability_zero_is_ever_drawn():
    logprobs = torch.tensor([-torch.inf, 0.1, -torch.inf, -torch.inf, 0.9, -torch.inf]).log_softmax(
        dim=-1
    )
    noise = draw_exponentials([open_random_stream(seed) for seed in range(50)], 6)
    noise[:, [0, 1]] = torch.tensor([[0.0, 5e-324], [5e-324, 0.0]], dtype=torch.float64).repeat(
        25, 1
    )
    drawn, _ = sample_by_exponential_race(logprobs.expand(len(noise), -1), noise)
    assert set(drawn.tolist()) <= {1, 4}


def test_the_overlay_is_in_force_within_the_block_and_gone_after_an_exception():
    model = tiny()
    name = next(iter(model.trainable_parameters()))
    live = {key: value.data_ptr() for key, value in model.model.named_parameters()}
    before = model.model.get_parameter(name).clone()

    def break_off():
        with model.weights({name: torch.zeros_like(before)}):
            assert model.model.get_parameter(name).abs().max() == 0
            raise ArithmeticError("broken off")

    with pytest.raises(ArithmeticError, match="broken off"):
        break_off()
    assert torch.equal(model.model.get_parameter(name), before)
    assert live == {key: value.data_ptr() for key, value in model.model.named_parameters()}


def test_an_overlay_of_an_unknown_weight_changes_nothing():
    model = tiny()
    before = {name: value.clone() for name, value in model.model.named_parameters()}
    with (
        pytest.raises(KeyError),
        model.weights(
            {**{name: torch.zeros_like(v) for name, v in before.items()}, "x": torch.zeros(1)}
        ),
    ):
        pass
    assert all(torch.equal(value, before[name]) for name, value in model.model.named_parameters())


def test_a_sampler_with_an_overlay_is_the_other_model():
    model, other = tiny(seed=0), tiny(seed=1)
    overlay = {name: value.detach() for name, value in other.model.named_parameters()}
    sampler = LocalSampler(model, overlay)
    assert same(
        sampler.sample(requests(), SamplingParams(6)),
        LocalSampler(other).sample(requests(), SamplingParams(6)),
    )
    request = ScoreRequest(random_tokens(6, 1), (5, 6, 7))
    signal = sampler.score([request], TopK())[0]
    expected = LocalSampler(other).score([request], TopK())[0]
    torch.testing.assert_close(
        signal.head.logprobs(signal.hidden), expected.head.logprobs(expected.hidden)
    )


def test_padding_rows_of_the_embedding_are_never_sampled_and_hold_no_mass():
    model = tiny(rows=72)
    (signal,) = LocalSampler(model).score([ScoreRequest(random_tokens(6, 1), (5, 6, 7))], Full())
    logprobs = signal.head.logprobs(signal.hidden)
    assert logprobs.shape == (3, VOCABULARY)
    torch.testing.assert_close(logprobs.exp().sum(-1).cpu(), torch.ones(3))


def test_states_beyond_the_bound_wait_on_the_host_and_come_back(
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that a pass takes four of the texts on every device; a GPU's own limit would take all of them."""
    monkeypatch.setattr(local_sampler, "find_limits", lambda device: ON_CPU)
    model = tiny()
    texts = [ScoreRequest(random_tokens(40, n), random_tokens(200 + n, 50 + n)) for n in range(10)]
    with count_transfers() as few:
        resident = LocalSampler(model).score(texts, Full())
    states = [signal.hidden for signal in resident]
    assert all(isinstance(hidden, torch.Tensor) for hidden in states)
    first_pass = sum(hidden.nbytes for hidden in states[:4])
    with count_transfers() as many:
        stored = LocalSampler(model, device_bytes=first_pass).score(texts, Full())
    for number, (signal, expected) in enumerate(zip(stored, states, strict=True)):
        waits = isinstance(signal.hidden, HostStates)
        assert waits == (number >= 4 and model.device.type != "cpu")
        if waits:
            assert signal.hidden.numbers.device.type == "cpu" and signal.hidden.finite
            assert len(signal.hidden) == len(texts[number].tokens)
        assert signal.states.device == expected.device
        assert torch.equal(signal.states.cpu(), expected.cpu())
    passes_on_host = 2 if Current.place is SECOND else 0
    assert many["to the CPU"] - few["to the CPU"] == passes_on_host, "one transfer a pass"


def test_a_local_model_can_answer_everything():
    capabilities = LocalSampler(tiny()).capabilities
    assert capabilities.signals == {"sampled", "topk", "full"}
    assert capabilities.largest_k is None


def mixed(asked: list[SampleRequest], extra: int = 4) -> list[MixedRequest]:
    """Return the same requests; the teacher reads `extra` tokens before each prompt."""
    return [
        MixedRequest(
            request.prompt_tokens, random_tokens(extra, 7) + request.prompt_tokens, request.seed
        )
        for request in asked
    ]


def equal(first, second):
    return same(first, second) and all(
        torch.equal(one.sampling_logprobs, other.sampling_logprobs)
        for one, other in zip(first, second, strict=True)
    )


@pytest.mark.float32
@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_a_mixed_sample_are_those_of_the_mixture(model, share, temperature):
    other = tiny("llama", seed=5)
    params = SamplingParams(12, temperature, stop_ids=STOPS)
    asked = mixed(requests())
    samples = LocalSampler(model).sample_mixed(
        asked, LocalSampler(other), MixtureRule(share), params
    )
    for request, sample in zip(asked, samples, strict=True):
        tokens = sample.tokens.tolist()
        own = logprobs_by_transformers(model, request.prompt_tokens, tokens)
        theirs = logprobs_by_transformers(other, request.teacher_prompt_tokens, tokens)
        mixture = share * torch.softmax(theirs / temperature, -1) + (1 - share) * torch.softmax(
            own / temperature, -1
        )
        drawn = sample.tokens[:, None]
        torch.testing.assert_close(
            sample.sampling_logprobs, mixture.log().gather(1, drawn)[:, 0].float(), **EXACT
        )
        torch.testing.assert_close(
            sample.policy_logprobs, own.gather(1, drawn)[:, 0].float(), **EXACT
        )


def test_no_share_of_the_teacher_is_the_student_to_the_bit(model):
    params = SamplingParams(12, temperature=0.8, top_k=9, top_p=0.9, stop_ids=STOPS)
    alone = LocalSampler(model).sample(requests(), params)
    together = LocalSampler(model).sample_mixed(
        mixed(requests()), LocalSampler(tiny(seed=5)), MixtureRule(0.0), params
    )
    assert equal(alone, together)
    assert all(
        torch.equal(a.policy_logprobs, b.policy_logprobs)
        for a, b in zip(alone, together, strict=True)
    )


def test_the_teachers_whole_share_is_the_teacher(model):
    params = SamplingParams(12, temperature=0.8, top_k=9, top_p=0.9, stop_ids=STOPS)
    teacher = LocalSampler(tiny(seed=5))
    asked = mixed(requests())
    alone = teacher.sample(
        [SampleRequest(request.teacher_prompt_tokens, request.seed) for request in asked], params
    )
    together = LocalSampler(model).sample_mixed(asked, teacher, MixtureRule(1.0), params)
    assert equal(alone, together)
    assert not any(
        torch.equal(a.policy_logprobs, b.policy_logprobs)
        for a, b in zip(alone, together, strict=True)
    )


def test_a_mixed_request_gets_the_same_tokens_in_any_company(model):
    teacher, params = LocalSampler(tiny(seed=5)), SamplingParams(12, stop_ids=STOPS)
    asked = mixed(requests(shared=20))
    together = LocalSampler(model).sample_mixed(asked, teacher, MixtureRule(0.4), params)
    assert same(
        together,
        LocalSampler(model, batch_size=3).sample_mixed(asked, teacher, MixtureRule(0.4), params),
    )
    assert same(
        together,
        [
            LocalSampler(model).sample_mixed([one], teacher, MixtureRule(0.4), params)[0]
            for one in asked
        ],
    )
    assert LocalSampler(model).sample_mixed([], teacher, MixtureRule(0.4), params) == []


def test_frequencies_of_mixed_sequences_are_their_probabilities_by_enumeration():
    """Chi-square over 2000 sequences of two tokens out of three: 8 degrees of freedom, the 0.999 quantile is 26.1."""
    student, teacher = (replace(tiny(seed=seed), vocab_size=3) for seed in (0, 5))
    prompt, longer, share, draws = (1, 2), (2, 0, 1, 2), 0.3, 2000
    asked = [MixedRequest(prompt, longer, seed) for seed in range(draws)]
    samples = LocalSampler(student, batch_size=500).sample_mixed(
        asked, LocalSampler(teacher), MixtureRule(share), SamplingParams(2)
    )
    seen = [tuple(sample.tokens.tolist()) for sample in samples]
    total = 0.0
    for first, second in itertools.product(range(3), repeat=2):
        probability = 1.0
        for place, token in enumerate((first, second)):
            before = (first, second)[:place]
            s, t = (
                next_token(model, (*start, *before))
                for model, start in ((student, prompt), (teacher, longer))
            )
            probability *= share * t[token].item() + (1 - share) * s[token].item()
        expected = draws * probability
        total += (seen.count((first, second)) - expected) ** 2 / expected
    assert total < 26.1


@torch.no_grad()
def next_token(model, tokens):
    ids = torch.tensor([tokens], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.autocast):
        logits = model.model(input_ids=ids).logits[0, -1, : model.vocab_size].cpu()
    return torch.softmax(logits.double(), dim=-1)


def test_a_self_teacher_decodes_in_lockstep_with_the_student_it_shares_its_modules_with():
    model, params = tiny(), SamplingParams(10, stop_ids=STOPS)
    student, teacher = (
        LocalSampler(model),
        LocalTrainer(model).build_self_teacher(WeightUpdateRule("frozen")),
    )
    before = tiny()
    for value in model.trainable_parameters().values():
        value.data.mul_(1.1)
    asked = mixed(requests())
    found = student.sample_mixed(asked, teacher, MixtureRule(0.5), params)
    assert equal(found, student.sample_mixed(asked, LocalSampler(before), MixtureRule(0.5), params))
    assert not same(found, student.sample(requests(), params))
    assert equal(
        teacher.sample_mixed(asked, student, MixtureRule(0.0), params),
        LocalSampler(before).sample(requests(), params),
    )


def test_local_clients_decode_in_lockstep():
    assert LocalSampler(tiny()).decodes_by_token
    teacher = LocalTrainer(tiny()).build_self_teacher(WeightUpdateRule("live"))
    assert teacher.decodes_by_token


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mixture_has_no_banned_tokens(share: float) -> None:
    # The banned token is the most likely token of both models.
    logits, teacher = torch.zeros(4000, 5), torch.zeros(4000, 5)
    logits[:, 3], teacher[:, 3], teacher[:, 1] = 9.0, 9.0, 1.0
    params = SamplingParams(4, banned_ids=frozenset({3}))
    noise = draw_exponentials([open_random_stream(seed) for seed in range(4000)], 5)
    sides = [TokenReading(side, params, noise) for side in (logits, teacher)]
    joint = MixtureRule(share).write(range(4000), *sides)
    tokens, sampled = joint.tokens, joint.logprobs
    policy = sides[0].compute_policy_logprobs(tokens)
    assert not (tokens == 3).any()
    rest = torch.tensor([0, 1, 2, 4])
    sides = (teacher[0, rest].softmax(-1), logits[0, rest].softmax(-1))
    expected = share * sides[0] + (1 - share) * sides[1]
    counts = torch.bincount(tokens, minlength=5)[rest] / 4000
    torch.testing.assert_close(counts, expected, atol=0.03, rtol=0)
    chosen = torch.bucketize(tokens, rest)
    torch.testing.assert_close(sampled, expected[chosen].log())
    torch.testing.assert_close(policy, logits.log_softmax(-1)[range(4000), tokens])
