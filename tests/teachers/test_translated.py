"""A teacher with another tokenizer scores the text of the student's tokens, span by span."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import Recorder, prompt, rollout
from teacher_services import Functions
from test_translated_law import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy import JOURNALS, curve, make_model, rows, toy_recipe, toy_run
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from practicum.errors import CapabilityError, RecipeError, VocabularyError
from practicum.objective import Full, Sampled, Signal, TopK
from practicum.ports import Capabilities, TeacherContext, TeacherRequest
from practicum.recipe import parse_recipe
from practicum.runs.plan import plan
from practicum.studies.doctor import doctor
from practicum.studies.doctor.translation import ReadAnswer
from practicum.teachers.privileged import Config as Privileged
from practicum.teachers.privileged import PrivilegedTeacher
from practicum.teachers.translated import (
    CommonTokens,
    Config,
    TranslatedTeacher,
    build,
    translate_rollout,
)
from practicum.text import TOKENIZERS, Renderer
from practicum.text.alignment import TokenBytes
from practicum.text.translation import Translator
from practicum.types import (
    AUTHORS,
    Message,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
    Turn,
)

LETTERS = "\u00e4\u00eb\u00ef\u00f6"
STOP = frozenset({2})
CHARACTERS = Renderer(TOKENIZERS["characters"](LETTERS), stop_ids=STOP)
BYTES = Renderer(TOKENIZERS["bytes"](LETTERS), stop_ids=STOP)
PAIRS = Renderer(TOKENIZERS["pairs"](LETTERS), stop_ids=STOP)


def by_span(student: Renderer, teacher: Renderer) -> Translator:
    return Translator(student, teacher, credit="span")


class Scorer(Recorder):
    """Gives each token another log-probability: its position, and the part of a token before it."""

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        self.asked.append(list(rollouts))
        return [TeacherSignal(logprobs=-torch.arange(1.0, len(one.tokens) + 1)) for one in rollouts]


def with_tokens(one: Rollout, tokens: torch.Tensor, mask: torch.Tensor, **fields: Any) -> Rollout:
    zeros = torch.zeros(len(tokens))
    numbers = {"sampling_logprobs": zeros, "policy_logprobs": zeros}
    return replace(one, tokens=tokens, loss_mask=mask, **numbers, **fields)


def written(renderer: Renderer, text: str, *, stops: bool = True, **fields: Any) -> Rollout:
    tokens = torch.tensor(renderer.encode_answer_text(text) + [2] * stops, dtype=torch.long)
    return replace(
        rollout(prompt("p"), text=text),
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        sampling_logprobs=torch.zeros(len(tokens)),
        policy_logprobs=torch.zeros(len(tokens)),
        **fields,
    )


def test_the_log_probability_of_a_span_is_that_of_the_teachers_tokens_in_it() -> None:
    """Read each character as two bytes: two of the teacher's tokens to one, and one to four."""
    scorer = Scorer()
    teacher = TranslatedTeacher(scorer, by_span(CHARACTERS, BYTES))
    (answer,) = teacher.score([written(CHARACTERS, LETTERS[:2])], Sampled())
    assert answer.logprobs is not None and answer.span_starts is not None
    assert answer.logprobs.tolist() == [-3.0, -7.0, -5.0]
    assert answer.span_starts.all() and answer.unknown is not None and not answer.unknown.any()
    ((asked,),) = scorer.asked
    assert asked.tokens.tolist() == [*BYTES.encode(LETTERS[:2]), 2]
    assert asked.loss_mask.all() and asked.policy_logprobs.isnan().all()

    teacher = TranslatedTeacher(Scorer(), by_span(BYTES, PAIRS))
    (answer,) = teacher.score([written(BYTES, LETTERS[:3])], Sampled())
    assert answer.logprobs is not None and answer.span_starts is not None
    # Four bytes are one pair, two bytes the last character.
    assert answer.logprobs.tolist() == [-0.25] * 4 + [-1.0] * 2 + [-3.0]
    assert answer.span_starts.tolist() == [True, *[False] * 3, True, False, True]


class Chain(Recorder):
    """A distribution over characters, as a model of bytes: the first byte's, and the second's after it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(len(LETTERS) + 1, generator=generator, dtype=torch.float64)
        self.of = dict(zip([*LETTERS, ""], logits.log_softmax(0).tolist(), strict=True))

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        return [TeacherSignal(logprobs=self.read(one.tokens.tolist())) for one in rollouts]

    def read(self, tokens: list[int]) -> torch.Tensor:
        logprobs, begun = [], b""
        for token in tokens:
            piece = b"" if token == 2 else BYTES.tokenizer.decode([token]).encode()
            piece = piece if token == 2 else Translator(BYTES, BYTES)._teacher_bytes.pieces[token]
            likely = [
                (letter.encode(), logprob)
                for letter, logprob in self.of.items()
                if letter.encode().startswith(begun)
            ]
            total = sum(math.exp(logprob) for _, logprob in likely)
            after = [
                logprob
                for letter, logprob in likely
                if (letter.startswith(begun + piece) if piece else not letter)
            ]
            logprobs.append(math.log(sum(map(math.exp, after)) / total))
            begun = (begun + piece) if len(begun) == 0 and piece else b""
        return torch.tensor(logprobs, dtype=torch.float64)


def test_cutting_every_token_in_two_keeps_the_log_probability_of_every_text() -> None:
    teacher = TranslatedTeacher(Chain(), by_span(CHARACTERS, BYTES))
    texts = ["", *LETTERS, LETTERS, LETTERS[::-1] + LETTERS[:1]]
    answers = teacher.score([written(CHARACTERS, text) for text in texts], Sampled())
    for text, answer in zip(texts, answers, strict=True):
        assert answer.logprobs is not None
        expected = [Chain().of[letter] for letter in [*text, ""]]
        torch.testing.assert_close(answer.logprobs, torch.tensor(expected, dtype=torch.float64))


def test_the_students_own_tokens_are_passed_on_as_they_are() -> None:
    scorer = Recorder()
    asked = [written(CHARACTERS, "xy"), written(CHARACTERS, "")]
    teacher = TranslatedTeacher(scorer, None)
    assert teacher.score(asked, Sampled())[0].span_starts is None
    assert scorer.asked == [asked]
    teacher.sample([TeacherRequest(prompt("p"), 5)], SamplingParams(3, stop_ids=STOP))
    assert scorer.prompts == [prompt("p")]


def test_a_token_that_means_nothing_to_the_teacher_is_silent() -> None:
    teacher = TranslatedTeacher(Scorer(), Translator(CHARACTERS, BYTES))
    own = written(CHARACTERS, LETTERS)
    tokens = torch.cat([own.tokens[:1], torch.tensor([3]), own.tokens[1:]])
    ones = torch.ones(len(tokens), dtype=torch.bool)
    (answer,) = teacher.score([with_tokens(own, tokens, ones)], Sampled())
    assert answer.unknown is not None
    assert answer.unknown.tolist() == [False, True, False, False, False, False]
    unwritable = with_tokens(own, torch.tensor([3]), ones[:1])
    assert teacher.score([unwritable, own], Sampled())[0].is_empty
    assert not teacher.score([unwritable, own], Sampled())[1].is_empty


def test_a_span_that_is_not_all_trained_on_or_has_two_authors_is_silent() -> None:
    own = written(BYTES, LETTERS)
    mask = torch.ones_like(own.loss_mask)
    mask[1] = False
    text = translate_rollout(replace(own, loss_mask=mask), by_span(BYTES, PAIRS))
    assert [span.student.start for span in text.spans] == [4, 8]
    assert text.tokens == (*PAIRS.encode(LETTERS), 2)
    authors = torch.zeros(len(own.tokens), dtype=torch.uint8)
    authors[6:] = AUTHORS.index("teacher")
    text = translate_rollout(replace(own, authors=authors), by_span(BYTES, PAIRS))
    assert [span.student.start for span in text.spans] == [0, 8]


def test_a_conversation_is_read_turn_by_turn_in_the_teachers_template() -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    letters = LETTERS + "[]user"
    teacher = Renderer(TOKENIZERS["pairs"](letters), template=template, stop_ids=STOP)
    student = Renderer(TOKENIZERS["bytes"](letters), stop_ids=STOP)
    said = [LETTERS[:2], LETTERS[2:]]
    observed = student.render_reply(Message("user", LETTERS[0]))
    turns = [[*student.encode(text), 2] for text in said]
    tokens = torch.tensor([*turns[0], *observed, *turns[1]])
    mask = torch.tensor([True] * 5 + [False] * len(observed) + [True] * 5)
    one = with_tokens(
        written(student, ""),
        tokens,
        mask,
        turns=(
            Turn("assistant", 5, said[0]),
            Turn("user", len(observed), LETTERS[0]),
            Turn("assistant", 5, said[1]),
        ),
    )
    text = translate_rollout(one, Translator(student, teacher))
    reply = teacher.render_reply(Message("user", LETTERS[0]))
    assert text.tokens == (
        *teacher.encode(said[0]),
        2,
        *reply,
        *teacher.encode(said[1]),
        2,
    )
    assert "[user]" in teacher.tokenizer.decode(list(reply))
    starts = [span.student.start for span in text.spans]
    assert starts == [0, 4, 5 + len(observed), 9 + len(observed)]
    answers = TranslatedTeacher(Scorer(), Translator(student, teacher)).score([one], Sampled())
    assert answers[0].unknown is not None and answers[0].unknown.equal(~mask)


def test_what_it_writes_comes_in_the_students_tokens_and_ends_at_its_own_stop() -> None:
    class Writer(Recorder):
        def sample(self, requests, params):
            self.stops = params.stop_ids
            tokens = torch.tensor([*PAIRS.encode(LETTERS[:3]), 3])
            return [Sample(tokens, torch.zeros(3), torch.zeros(3), "stop") for _ in requests]

    writer = Writer()
    theirs = Renderer(PAIRS.tokenizer, stop_ids=frozenset({2, 3}))
    teacher = TranslatedTeacher(writer, Translator(BYTES, theirs, "<user>"))
    params = SamplingParams(9, stop_ids=STOP)
    (sample,) = teacher.sample([TeacherRequest(prompt("p"), 0)], params) or []
    assert writer.stops == {2, 3}
    assert sample.tokens.tolist() == [*BYTES.encode(LETTERS[:3]), 2]
    client = teacher.bind_prompt(prompt("p"))
    assert client is not None and not client.accepts_tokens
    writer.capabilities = Capabilities(frozenset({"sampled"}), writes=False)
    assert teacher.bind_prompt(prompt("p")) is None


def test_a_context_may_be_inside_or_outside() -> None:
    config = Privileged.model_validate({"teacher": {"type": "self"}, "reference": "{attempt}"})
    inside, outside = Scorer(), Scorer()
    translator = Translator(CHARACTERS, BYTES)
    TranslatedTeacher(PrivilegedTeacher(inside, config), translator).score(
        [written(CHARACTERS, LETTERS)], Sampled()
    )
    PrivilegedTeacher(TranslatedTeacher(outside, translator), config).score(
        [written(CHARACTERS, LETTERS)], Sampled()
    )
    ((one,),), ((other,),) = inside.asked, outside.asked
    assert one.prompt == other.prompt and LETTERS in one.prompt.messages[-1].content
    assert one.tokens.equal(other.tokens)


def recipe(teacher: dict[str, Any]) -> dict[str, Any]:
    return {"student": {"model": "s"}, "teacher": teacher, "task": {"type": "reverse"}} | {
        "train": {"steps": 1},
        "objective": {"signal": "sampled"},
    }


def test_what_it_cannot_be_around_is_said_when_the_recipe_is_read() -> None:
    inner = {"type": "model", "model": "m"}
    translated = {"type": "translated", "teacher": inner}
    for teacher, reason in (
        ({"type": "translated", "teacher": translated}, "already translated; remove one"),
        (
            {"type": "translated", "teacher": {"type": "pool", "teachers": {"a": inner}}},
            "a pool is several teachers; put `translated` around each member",
        ),
    ):
        with pytest.raises(RecipeError, match=reason):
            parse_recipe(recipe(teacher), "r")


def test_a_teacher_without_a_tokenizer_of_its_own_is_refused() -> None:
    services = Functions(build=lambda context, config: Recorder())
    context = TeacherContext(CHARACTERS, services)
    with pytest.raises(CapabilityError, match="'self' has no separate tokenizer; remove"):
        build(Config.model_validate({"teacher": {"type": "self"}}), context)


def changes(folder: Path, **more: Any) -> dict[str, Any]:
    inner = {"type": "model", "model": str(folder)}
    return {
        "teacher": {"type": "translated", "teacher": inner},
        "objective": {"signal": "sampled"},
        **more,
    }


def permute(source: Path, folder: Path) -> Path:
    """Return a model with the same tokens under other ids."""
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    names = sorted(tokenizer.get_vocab(), key=lambda token: tokenizer.get_vocab()[token])
    order = [*range(7), *reversed(range(7, len(names)))]
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[: len(order)] = weight[order].clone()
    vocabulary = {names[old]: new for new, old in enumerate(order)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.pre_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()).pre_tokenizer
    backend.decoder = decoders.Fuse()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    special.pop("additional_special_tokens", None)
    copied = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **special,
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )
    model.save_pretrained(folder)
    copied.save_pretrained(folder)
    return folder


def test_a_permuted_vocabulary_equals_the_plain_run_to_rounding(
    models: Path, tmp_path: Path
) -> None:
    other = permute(models / "teacher", tmp_path / "permuted")
    plain = {
        "teacher": {"type": "model", "model": str(models / "teacher")},
        "objective": {"signal": "sampled"},
    }
    first = toy_run(models, tmp_path / "plain", plain).folder
    second = toy_run(models, tmp_path / "translated", changes(other)).folder
    for name in ("loss", "reverse_kl", "grad_norm"):
        assert curve(first, name) == pytest.approx(curve(second, name), rel=2e-4, abs=1e-5)
    with pytest.raises(VocabularyError, match=r"write teacher: \{type: translated"):
        toy_run(models, tmp_path / "refused", {"teacher.model": str(other)})


def test_the_students_own_vocabulary_gives_the_same_bytes(models: Path, tmp_path: Path) -> None:
    plain = {
        "teacher": {"type": "model", "model": str(models / "teacher")},
        "objective": {"signal": "sampled"},
    }
    first = toy_run(models, tmp_path / "plain", plain).folder
    second = toy_run(models, tmp_path / "translated", changes(models / "teacher")).folder
    for name in JOURNALS[:2]:
        drop = {"seconds"}
        one, other = rows(first / name), rows(second / name)
        assert [{k: v for k, v in row.items() if k not in drop} for row in one] == [
            {k: v for k, v in row.items() if k not in drop} for row in other
        ]


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("characters", "pairs"), pytest.param("pairs", "bytes", marks=pytest.mark.long)],
)
def test_a_run_resumes_where_it_was(student: str, teacher: str, tmp_path: Path) -> None:
    make_model(tmp_path / "student", seed=1, tokenizer=student)
    make_model(tmp_path / "other", seed=2, tokenizer=teacher, pretrain=20)
    more = changes(tmp_path / "other", **{"train.steps": 4})
    whole = toy_run(tmp_path, tmp_path / "whole", more).folder
    half = toy_run(tmp_path, tmp_path / "half", more | {"train.steps": 2}).folder
    toy_run(tmp_path, tmp_path / "half", more, resume=True, allow_changed=["train.steps"])
    assert rows(half / "rollouts.jsonl") == rows(whole / "rollouts.jsonl")
    assert all(math.isfinite(loss) for loss in curve(whole, "loss"))
    assert all(0 <= share < 1 for share in curve(whole, "tokens_outside"))


def test_it_can_be_planned(models: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", tokenizer="pairs")
    metrics = plan(toy_recipe(models, changes(tmp_path / "other"))).run.metrics
    assert metrics["cost/scored_tokens"] == 8 * 5


def test_the_doctor_says_how_the_answers_are_read(tmp_path: Path) -> None:
    make_model(tmp_path / "student", seed=1, tokenizer="pairs", pretrain=40)
    make_model(tmp_path / "other", seed=2, pretrain=40)
    found = doctor(toy_recipe(tmp_path, changes(tmp_path / "other")), prompts=4, samples=2)
    (outcome,) = [result.outcome for result in found.results if result.check.id == "P1"]
    assert "the student's stop (</s>) stands for the teacher's </s>" in outcome.sentence
    details = outcome.details
    assert 0 <= details["share of bytes in spans of one token each"] < 1
    assert details["mean tokens of a span"] == 1.0
    assert details["share of digits that are split differently"] is None
    assert details["share of answers that re-tokenize differently"] >= 0
    assert details["nats per answer gained by re-tokenizing"] is not None


def test_digits_that_are_split_differently_are_counted() -> None:
    digits = [Renderer(TOKENIZERS[kind]("0123 ab"), stop_ids=STOP) for kind in ("pairs", "bytes")]
    own = TokenBytes.read(digits[0].tokenizer)
    tokens = digits[0].encode("012 b")
    answer = ReadAnswer(
        rollout(prompt("p")), by_span(*digits).translate(tokens).spans, own.spell(tokens)
    )
    assert [count for _, count in answer.digits] == [2, 1]
    assert [span.is_single for span, _ in answer.digits] == [False, False]


def test_words_are_joined_up_to_where_a_space_begins_a_new_one() -> None:
    own = Renderer(TOKENIZERS["bytes"]("ab"), stop_ids=STOP)
    merges = [("a", "b"), ("\u2581", "b")]
    other = tokenizer(["a", "b", "\u2581", *map("".join, merges)], merges)
    tokens = [*own.encode("aba  b a"), 2]
    words = Translator(own, other).translate(tokens).spans
    assert [(span.student.start, span.student.stop) for span in words] == [
        (0, 3),
        (3, 6),
        (6, 8),
        (8, 9),
    ]
    spans = by_span(own, other).translate(tokens).spans
    assert [span.student.start for span in spans] == [0, 2, 3, 4, 6, 7, 8]
    # A token across two words may join them, so nothing is decided before the end.
    crossing = Renderer(TOKENIZERS["pairs"]("ab "), stop_ids=STOP)
    (text, stop) = Translator(own, crossing).translate(tokens).spans
    assert text.student == slice(0, 8) and stop.student == slice(8, 9)


def test_a_word_starts_with_a_space_or_a_control_token() -> None:
    sides = [Renderer(TOKENIZERS[kind]("ab \n"), stop_ids=STOP) for kind in ("bytes", "pairs")]
    for renderer, starts in zip(sides, by_span(*sides).find_word_starts(), strict=True):
        special = set(renderer.tokenizer.all_special_ids)
        assert starts == [
            token
            for token in range(renderer.vocab_size)
            if token in special or renderer.tokenizer.decode([token]).startswith((" ", "\t", "\n"))
        ]
        assert special <= set(starts) and len(special) < len(starts) < renderer.vocab_size
    named = Renderer(TOKENIZERS["bytes"]("ab "), stop_ids=frozenset({9}))
    assert 9 in by_span(named, sides[1]).find_word_starts()[0]


def test_a_permuted_vocabulary_has_the_same_distributions(models: Path, tmp_path: Path) -> None:
    other = permute(models / "teacher", tmp_path / "permuted")
    plain = {"teacher": {"type": "model", "model": str(models / "teacher")}}
    for signal in (
        "full",
        "topk(3)",
        "topk(3, support=teacher)",
        "sorted(matched=true)",
        "projected",
    ):
        changed = {"objective": {"signal": signal}, "train.steps": 2}
        first = toy_run(models, tmp_path / f"plain {signal}", plain | changed).folder
        second = toy_run(models, tmp_path / f"other {signal}", changes(other) | changed).folder
        for name in ("loss", "reverse_kl", "grad_norm"):
            assert curve(first, name) == pytest.approx(curve(second, name), rel=2e-4, abs=1e-5)


def test_tokens_that_both_have_are_compared_and_the_others_are_one_bucket() -> None:
    class Head:
        vocab_size, key = PAIRS.vocab_size, (1,)

        def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.log_softmax(-1)

        def logits(self, hidden: torch.Tensor, room: object = None) -> torch.Tensor:
            return hidden

        def release(self) -> None:
            pass

    class Model(Recorder):
        def score(self, rollouts, signal):
            return [TeacherSignal(hidden=states[: len(r.tokens)], head=Head()) for r in rollouts]

    states = torch.randn(9, PAIRS.vocab_size, generator=torch.Generator().manual_seed(0))
    translator = Translator(CHARACTERS, PAIRS)
    # Three characters are a pair and a single one, so one character and the stop are in both.
    (answer,) = TranslatedTeacher(Model(), translator).score(
        [written(CHARACTERS, LETTERS[:3])], Full()
    )
    assert answer.unknown is not None and answer.unknown.tolist() == [True, True, False, False]
    assert answer.head is not None and answer.hidden is not None and answer.outside is not None
    assert answer.outside.tolist() == [0, 1, 3, 4, 5, 6]
    folded = answer.head.logprobs(answer.hidden)
    torch.testing.assert_close(folded.exp().sum(-1), torch.ones(4))
    torch.testing.assert_close(answer.head.logits(answer.hidden).log_softmax(-1), folded)
    own = states[1:3].log_softmax(-1)
    places = PAIRS.tokenizer.convert_tokens_to_ids(list(LETTERS))
    torch.testing.assert_close(folded[2:, 7:-1], own[:, places])
    torch.testing.assert_close(folded[2:, 2], own[:, 2])
    rest = [n for n in range(PAIRS.vocab_size) if n not in (*places, 2)]
    torch.testing.assert_close(folded[2:, -1], own[:, rest].logsumexp(-1))


def test_candidates_of_a_server_that_the_student_lacks_go_to_the_tail() -> None:
    class Server(Recorder):
        def score(self, rollouts, signal):
            (one,) = rollouts
            first = PAIRS.tokenizer.convert_tokens_to_ids(LETTERS[0])
            ids = torch.tensor([[first, 280]] * len(one.tokens))
            numbers = torch.tensor([[-1.0, -2.0]] * len(one.tokens))
            return [TeacherSignal(numbers[:, 0], ids, numbers)]

    teacher = TranslatedTeacher(Server(), Translator(CHARACTERS, PAIRS))
    (answer,) = teacher.score([written(CHARACTERS, LETTERS[0])], TopK(k=2, support="teacher"))
    assert answer.topk_ids is not None and answer.topk_logprobs is not None
    assert answer.topk_ids.tolist() == [[7, 0], [7, 0]]
    assert answer.topk_logprobs.tolist() == [[-1.0, -math.inf]] * 2


def test_the_tokens_that_the_teacher_lacks_are_spelled_in_its_own() -> None:
    student, teacher = PAIRS, CHARACTERS
    translator = Translator(student, teacher)
    common = CommonTokens.of(translator)
    spellings = common.spell_others(translator)
    assert set(spellings[:, 0].tolist()) <= set(common.outside.tolist())
    pair = student.tokenizer.convert_tokens_to_ids(LETTERS[0] + LETTERS[1])
    spelled = [(column, place) for token, column, place in spellings.tolist() if token == pair]
    letters = [student.tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS[:2]]
    # The columns of tokens that both have are the student's ids.
    assert spelled == [(letters[0], 0), (letters[1], 1)]
    assert teacher.decode(list(translator.spell(pair))) == LETTERS[:2]
