"""A teacher with other tokens is asked and answers in the student's ids; it reads unknown tokens as their text."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import enable_packing
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import CapabilityError, TeacherError
from practicum.functional.support import fold_outside
from practicum.objective import Full, Sampled, TopK
from practicum.ports import (
    Capabilities,
    MixedRequest,
    MixtureRule,
    SamplingClient,
    TeacherContext,
)
from practicum.teachers.cached import CachingClient, ModelScores
from practicum.teaching.vocabulary import translate_client
from practicum.text import Renderer, build_character_tokenizer, refuse_banned_ids
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

CHARACTERS = build_character_tokenizer("abcd")
OWN, FIRST, SECOND = 11, 12, 13
"""One token that only the student has, and two that only the teacher has."""

PROMPT = (1, 3, 7, 8, 4)


def with_tokens(**ids: int) -> PreTrainedTokenizerFast:
    """Return the characters' tokenizer with more tokens."""
    from tokenizers import Tokenizer

    data = json.loads(CHARACTERS.backend_tokenizer.to_str())
    data["model"]["vocab"] |= ids
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        **{
            name: str(token)
            for name, token in CHARACTERS.special_tokens_map.items()
            if name.endswith("_token")
        },
        chat_template=CHARACTERS.chat_template,
        clean_up_tokenization_spaces=False,
    )


STUDENT = Renderer(with_tokens(ab=OWN), stop_ids=frozenset({2}))
TEACHER = Renderer(with_tokens(x=FIRST, y=SECOND), stop_ids=frozenset({2}))


def sampler(size: int, seed: int = 0) -> LocalSampler:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=size + 3,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    return LocalSampler(enable_packing(LanguageModel(model, size)))


def context() -> TeacherContext:
    return TeacherContext(STUDENT)


def translated(client, renderer=TEACHER):
    return translate_client(client, renderer, context())


def test_a_client_with_the_same_vocabulary_is_left_alone() -> None:
    client = sampler(12)
    assert translate_client(client, STUDENT, context()) is client
    copied = replace(STUDENT, tokenizer=with_tokens(ab=OWN))
    assert translate_client(client, copied, context()) is client


def test_it_reads_a_token_that_it_lacks_as_its_text_and_says_nothing_there() -> None:
    teacher = sampler(14)
    tokens = (9, OWN, 7, 2)
    (signal,) = translated(teacher).score([ScoreRequest((*PROMPT, OWN), tokens)], Full())
    # The student's `ab` is `a`, `b` for the teacher.
    spelled = ScoreRequest((*PROMPT, 7, 8), (9, 7, 8, 7, 2))
    (bare,) = teacher.score([spelled], Full())
    assert signal.unknown is not None and signal.unknown.tolist() == [False, True, False, False]
    assert signal.outside is not None and signal.outside.tolist() == [OWN]
    full = signal.head.logprobs(signal.hidden)
    own = bare.head.logprobs(bare.hidden)[[0, 1, 3, 4]]
    assert full.shape == (4, 13)
    torch.testing.assert_close(full[:, :11], own[:, :11])
    assert torch.isneginf(full[:, OWN]).all()
    # Id 11 is a hole of the teacher's vocabulary: its row has mass, and belongs to no token.
    torch.testing.assert_close(full[:, 12], own[:, [11, 12, 13]].logsumexp(-1))
    torch.testing.assert_close(full.exp().sum(-1), torch.ones(4))
    logits = signal.head.logits(signal.hidden)
    torch.testing.assert_close(torch.log_softmax(logits, -1), full)

    (sampled,) = translated(teacher).score([ScoreRequest(PROMPT, tokens)], Sampled())
    (bare,) = teacher.score([ScoreRequest(PROMPT, spelled.tokens)], Sampled())
    torch.testing.assert_close(sampled.logprobs[[0, 2, 3]], bare.logprobs[[0, 3, 4]])
    assert sampled.outside is not None
    assert sampled.unknown.equal(signal.unknown)


def test_answers_are_stored_in_the_teachers_ids() -> None:
    """`cached` is inside the translation: it stores the model's own answer."""
    teacher = sampler(14)
    cached = CachingClient(teacher, lambda: ModelScores("", None))
    request = ScoreRequest(PROMPT, (9, OWN, 7))
    (first,) = translated(cached).score([request], Full())
    (plain,) = translated(teacher).score([request], Full())
    assert first.unknown.equal(plain.unknown)
    torch.testing.assert_close(
        first.head.logprobs(first.hidden), plain.head.logprobs(plain.hidden), atol=1e-2, rtol=1e-2
    )


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.9}]
)
def test_it_never_writes_a_token_that_the_student_lacks(settings) -> None:
    teacher = sampler(14)
    with torch.no_grad():
        head = teacher.language_model.model.get_output_embeddings()
        head.weight[[11, FIRST, SECOND]] *= 3
    requests = [SampleRequest(PROMPT, seed) for seed in range(40)]
    params = SamplingParams(6, **settings)
    written = {t for sample in teacher.sample(requests, params) for t in sample.tokens.tolist()}
    assert written & {11, FIRST, SECOND}
    samples = translated(teacher).sample(requests, params)
    assert {t for sample in samples for t in sample.tokens.tolist()} <= set(range(11))
    # The probability of a written token refers to the whole distribution, as in scoring.
    tokens = tuple(samples[0].tokens.tolist())
    (scored,) = translated(teacher).score([ScoreRequest(PROMPT, tokens)], Sampled())
    torch.testing.assert_close(samples[0].policy_logprobs, scored.logprobs, atol=1e-4, rtol=1e-4)
    assert (samples[0].sampling_logprobs >= samples[0].policy_logprobs - 1e-5).all() or settings


def test_a_mixture_of_both_is_over_the_students_tokens() -> None:
    student, teacher = sampler(12, seed=1), sampler(14)
    requests = [MixedRequest(PROMPT, (*PROMPT, FIRST), seed) for seed in range(40)]
    params = SamplingParams(6)
    for share in (0.5, 1.0):
        samples = student.sample_mixed(requests, translated(teacher), MixtureRule(share), params)
        written = {t for sample in samples for t in sample.tokens.tolist()}
        assert written <= set(range(12 if share < 1 else 11))
        assert share == 1.0 or OWN in written


class Remote(SamplingClient):
    """A client with own or requested candidates, which writes given tokens."""

    capabilities = Capabilities(signals=frozenset({"sampled", "topk"}), needs_candidates=True)

    def __init__(self, tokens=(7,)):
        self.tokens = tokens
        self.asked = []
        self.params = []

    def sample(self, requests, params):
        self.params.append(params)
        zeros = torch.zeros(len(self.tokens))
        return [Sample(torch.tensor(self.tokens), zeros, zeros, "length") for _ in requests]

    def score(self, requests, signal):
        self.asked += requests
        answers = []
        for request in requests:
            ids = request.candidates
            if ids is None:
                ids = torch.tensor([[7, FIRST, 9]]).expand(len(request.tokens), -1)
            values = torch.log(torch.tensor([0.5, 0.3, 0.1])).expand(len(request.tokens), -1)
            logprobs = -torch.arange(1.0, len(request.tokens) + 1)
            answers.append(TeacherSignal(logprobs, ids, values))
        return answers


def test_its_candidates_that_the_student_lacks_go_to_the_tail() -> None:
    request = ScoreRequest(PROMPT, (9, OWN, 7))
    (signal,) = translated(Remote()).score([request], TopK(k=3, support="teacher"))
    assert signal.topk_ids.tolist() == [[7, 0, 9]] * 3
    assert signal.topk_logprobs.exp().tolist() == [pytest.approx([0.5, 0.0, 0.1])] * 3
    assert signal.logprobs.tolist() == [-1.0, 0.0, -4.0]
    assert signal.head is None


def test_candidates_that_it_lacks_are_not_asked_for() -> None:
    candidates = torch.tensor([[7, OWN, 9], [1, 2, 3], [OWN, 0, 1]])
    remote = Remote()
    request = ScoreRequest(PROMPT, (9, OWN, 7), candidates)
    (signal,) = translated(remote).score([request], TopK(k=3, support="student"))
    sent = remote.asked[0].candidates
    # Two rows for the unknown token, which the teacher reads as two tokens.
    assert sent.tolist() == [[7, 0, 9], [1, 2, 3], [1, 2, 3], [2, 0, 1]]
    assert torch.isneginf(signal.topk_logprobs).tolist() == [
        [False, True, False],
        [False, False, False],
        [True, False, False],
    ]
    assert signal.topk_ids[~torch.isneginf(signal.topk_logprobs)].tolist() == [7, 9, 1, 2, 3, 0, 1]


def test_a_server_is_told_what_not_to_write_and_a_token_it_writes_all_the_same_is_refused() -> None:
    remote = Remote()
    translated(remote).sample(
        [SampleRequest(PROMPT, 0)], SamplingParams(4, stop_ids=frozenset({2, OWN}))
    )
    assert remote.params[0].banned_ids == {11, FIRST, SECOND}
    assert remote.params[0].stop_ids == {2}
    with pytest.raises(TeacherError, match=f"generated token {FIRST}, which the student lacks"):
        translated(Remote((7, FIRST))).sample([SampleRequest(PROMPT, 0)], SamplingParams(4))
    with pytest.raises(CapabilityError, match="a service cannot ban the 3 tokens"):
        refuse_banned_ids(remote.params[0], "a service")


def test_an_empty_completion_is_scored() -> None:
    (signal,) = translated(sampler(14)).score([ScoreRequest(PROMPT, ())], Full())
    assert signal.unknown.shape == (0,) and signal.head.logprobs(signal.hidden).shape == (0, 13)


def test_folding_is_a_function_of_the_ids() -> None:
    scores = torch.randn(3, 14, dtype=torch.float64).log_softmax(-1)
    folded = fold_outside(scores, 12, torch.tensor([11]), torch.tensor([11, 12, 13]))
    assert folded.shape == (3, 13)
    assert folded[:, :11].equal(scores[:, :11])
