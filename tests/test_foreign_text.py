"""For any server answer and any position of the key: every message is one line, and none contains the key."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.core.notes import show_notes
from practicum.errors import PracticumError, VocabularyError
from practicum.remote import http
from practicum.remote.http import JsonClient, JsonRequest, Server
from practicum.teaching.checks import check_texts
from practicum.teaching.probe import probe
from practicum.text import build_character_tokenizer

KEY = "sk-Vq/7+xYz=JwLmN-oPqRsTu"
"""Letters that URLs and JSON may write differently."""

RUNS = {KEY.lower()[start : start + 8] for start in range(len(KEY) - 7)}


class Client(JsonClient):
    """A client of a server with scripted answers; nothing goes over a wire."""

    def __init__(
        self, *answers: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.heard: list[str] = []
        super().__init__(Server("http://localhost:1", key=KEY, retry_seconds=0.0))
        self._answers = list(answers)
        self._status = status
        self._headers = http.httpx2.Headers({} if headers is None else headers)

    async def _exchange(
        self, client: http.httpx2.AsyncClient, question: JsonRequest, address: str
    ) -> tuple[int, http.httpx2.Headers, bytes]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return (
            self._status,
            self._headers,
            answer if isinstance(answer, bytes) else json.dumps(answer).encode(),
        )


def messages(client: Client, work: Any) -> str:
    """Return every message and error."""
    try:
        with show_notes(client.heard.append):
            work()
    except PracticumError as error:
        client.heard.append(str(error))
    assert not any("\n" in text for text in client.heard)
    return " | ".join(client.heard)


def has_key(text: str) -> bool:
    return any(run in text.lower() for run in RUNS)


@given(
    before=st.integers(0, 2000),
    status=st.sampled_from([200, 302, 400, 401, 404, 500, 503]),
    letter=st.sampled_from(["x", "\u00e9", "\x1b", " ", "\\"]),
)
def test_an_error_shows_no_part_of_the_key_wherever_it_is_cut(
    before: int, status: int, letter: str
) -> None:
    body = f"{letter * before}{KEY} and so on".encode()
    client = Client(body, status=status, headers={"Location": f"/{KEY}", "Content-Type": KEY})
    assert not has_key(messages(client, lambda: client.ask(JsonRequest("/v1/completions"))))


def test_a_key_across_the_end_of_what_is_looked_at_is_not_shown() -> None:
    """The first 1,600 bytes of the body are read, and spaces take no room in a message."""
    for missing in range(len(KEY)):
        body = b" " * (8 * http.MAX_EXCERPT_CHARACTERS - missing) + KEY.encode()
        client = Client(body, status=400)
        assert not has_key(
            messages(client, lambda client=client: client.ask(JsonRequest("/v1/models")))
        )


MODELS = {"data": [{"id": f"model-{KEY}"}, {"id": KEY.upper()}]}
ODD_ROW = {"choices": [{"prompt_logprobs": [{KEY: {"logprob": -1.0}}] * 27}]}
WORDS = {
    "choices": [{"logprobs": {"tokens": [f"token_id:{KEY}"] * 3, "token_logprobs": [KEY] * 3}}]
}


@pytest.mark.parametrize(
    "answer",
    [MODELS, ODD_ROW, WORDS, {"data": [{"id": KEY}]}],
    ids=["models", "row", "words", "one"],
)
@pytest.mark.parametrize("model", [None, "m"])
def test_a_probe_says_neither_ids_nor_reasons_with_the_key(answer: Any, model: str | None) -> None:
    listed = answer if "data" in answer else {"data": [{"id": "m"}]}
    client = Client(listed, answer)
    said = messages(
        client, lambda: client.heard.extend(probe(client, "auto", model, 5, 11).render_lines())
    )
    assert said and not has_key(said)


def test_texts_of_tokens_are_blotted_before_they_are_cut() -> None:
    client = Client({})
    tokenizer = build_character_tokenizer("abc")
    for place in range(40):
        texts = dict.fromkeys(range(3), f"{'x' * place}{KEY}")
        with pytest.raises(VocabularyError) as caught:
            check_texts(texts, tokenizer, client)
        assert not has_key(str(caught.value)) and "\n" not in str(caught.value)
