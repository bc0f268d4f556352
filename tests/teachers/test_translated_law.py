"""The credit of words is the gradient of the reverse KL of whole texts, by enumeration over random tokenizers."""

import itertools
import random

import pytest
import torch
from recorder import prompt
from recorder import rollout as some_rollout
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.objective import Objective, TeacherDistribution
from practicum.teachers.translated import spread_spans, translate_rollout
from practicum.text import Renderer
from practicum.text.from_scratch import CONTROL, TEMPLATE
from practicum.text.translation import Translator
from practicum.types import Datum, Rollout, TeacherSignal

LONGEST, STOP = 4, 2
BLANK = "\u2581"


def tokenizer(pieces: list[str], merges: list[tuple[str, str]]) -> Renderer:
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys([*CONTROL, *pieces]))}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return Renderer(wrapped, stop_ids=frozenset({STOP}))


class Pair:
    """A student of a few random pieces, a teacher of random merges, and random distributions of both."""

    def __init__(self, seed: int, *, crosses: bool = False) -> None:
        rng = random.Random(seed)
        made, merges = ["a", "b", BLANK], []
        while len(merges) < 6:
            pair = rng.choice(made), rng.choice(made)
            piece = "".join(pair)
            if piece not in made and len(piece) < 5 and (crosses or BLANK not in piece[1:]):
                made.append(piece)
                merges.append(pair)
        self.teacher = tokenizer(made, merges)
        pieces = rng.sample(["a", "b", "ab", "ba", f"{BLANK}a", "aa", f"b{BLANK}"], 3)
        self.student = tokenizer(["a", "b", BLANK, *pieces, BLANK], [])
        vocabulary = self.student.tokenizer.get_vocab()
        self.ids = [STOP, *(vocabulary[piece] for piece in dict.fromkeys([*pieces, BLANK]))]
        generator = torch.Generator().manual_seed(seed)
        states = [s for n in range(LONGEST) for s in itertools.product(self.ids[1:], repeat=n)]
        self.places = {state: n for n, state in enumerate(states)}
        self.logits = torch.randn(
            len(states), len(self.ids), generator=generator, dtype=torch.float64
        )
        self.seed = seed
        self.texts = [(*s, STOP) for s in states] + list(
            itertools.product(self.ids[1:], repeat=LONGEST)
        )
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def student_logprobs(self, logits: torch.Tensor, text: tuple[int, ...]) -> torch.Tensor:
        rows = torch.log_softmax(logits, -1)
        return torch.stack(
            [rows[self.places[text[:n]], self.ids.index(text[n])] for n in range(len(text))]
        )

    def teacher_logprobs(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return a distribution for every beginning of a text in the teacher's tokens."""
        numbers = []
        for n, token in enumerate(tokens):
            if tokens[:n] not in self.known:
                generator = torch.Generator().manual_seed(hash((self.seed, *tokens[:n])) % 2**31)
                logits = 1.5 * torch.randn(
                    self.teacher.vocab_size, generator=generator, dtype=torch.float64
                )
                self.known[tokens[:n]] = logits.log_softmax(-1)
            numbers.append(self.known[tokens[:n]][token])
        return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64)

    def rollout(self, text: tuple[int, ...]) -> Rollout:
        zeros = torch.zeros(len(text), dtype=torch.float64)
        base = some_rollout(prompt(str(text)))
        return Rollout(
            base.prompt,
            (1,),
            torch.tensor(text),
            torch.ones(len(text)).bool(),
            zeros,
            zeros,
            0,
            "stop",
            "",
        )

    def exact(self) -> torch.Tensor:
        logits = self.logits.clone().requires_grad_()
        translator = Translator(self.student, self.teacher)
        total = torch.zeros((), dtype=torch.float64)
        for text in self.texts:
            own = self.student_logprobs(logits, text).sum()
            translated = translator.translate(text)
            assert translated.whole
            total = total + own.exp() * (own - self.teacher_logprobs(translated.tokens).sum())
        return torch.autograd.grad(total, logits)[0]

    def expected(self, translator: Translator, *, carries: bool = True) -> torch.Tensor:
        """Return the gradient of the loss over every text, weighted by the student's probability."""
        objective = Objective.model_validate(
            {
                "losses": [{"signal": "sampled", "estimator": "score_function(gamma=1)"}],
                "aggregate": "seq_mean_token_sum",
            }
        )
        data = []
        for text in self.texts:
            rollout = self.rollout(text)
            translated = translate_rollout(rollout, translator)
            scores = self.teacher_logprobs(translated.tokens)
            signal = spread_spans(TeacherSignal(logprobs=scores), translated, len(text))
            assert not signal.unknown.any()
            data.append(Datum(rollout, signal))
        batch = build_token_batch(data, objective)
        if not carries:
            # Every second position: no token comes right after another.
            batch.positions.mul_(2)
        logits = self.logits.clone().requires_grad_()
        rows = torch.log_softmax(logits, -1)
        # One row of the vocabulary for each token, with the sampled one first.
        own = torch.cat([self.student_logprobs(logits, text) for text in self.texts])
        del rows
        student = torch.stack([own, torch.log1p(-own.exp())], -1)
        batch.tokens.zero_()
        teacher = TeacherDistribution(logprobs=torch.cat([datum.signal.logprobs for datum in data]))
        (values,) = compute_term_values(student, teacher, batch, objective)
        coefficients = compute_coefficients(objective.losses[0], values.detach(), batch)
        with torch.no_grad():
            often = torch.stack(
                [self.student_logprobs(self.logits, text).sum().exp() for text in self.texts]
            )
        weights = often[batch.rows] / batch.aggregate
        return torch.autograd.grad((weights * coefficients * values.loss_value).sum(), logits)[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_credit_of_words_is_the_exact_gradient(seed: int) -> None:
    pair = Pair(seed)
    translator = Translator(pair.student, pair.teacher)
    torch.testing.assert_close(pair.expected(translator), pair.exact(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_across_words_make_one_span_of_a_text(seed: int) -> None:
    pair = Pair(seed, crosses=True)
    translator = Translator(pair.student, pair.teacher)
    torch.testing.assert_close(pair.expected(translator), pair.exact(), rtol=1e-9, atol=1e-9)


def test_the_smallest_spans_are_not_and_neither_are_words_without_what_ends_them() -> None:
    """Check that a boundary that only the next token decides is credited to the tokens before it."""
    far = []
    for seed in range(5):
        pair = Pair(seed)
        exact = pair.exact()
        for translator, carries in (
            (Translator(pair.student, pair.teacher, credit="span"), False),
            (Translator(pair.student, pair.teacher), False),
        ):
            mine = pair.expected(translator, carries=carries)
            far.append(float((mine - exact).norm() / exact.norm()))
    assert min(far) > 0.01
