"""The service over tiny models: every endpoint, compared with the library underneath or with hand-computed numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from practicum import functional as F
from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.core.randomness import seed_of
from practicum.models.config import ModelConfig
from practicum.server.wire import load_messages
from practicum.types import SampleRequest, SamplingParams

from .client import V1, VerifierFailed, floats, logprobs, serving

PROMPT = [1, 4, 2, 3, 5, 2]
ASKED = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}


@pytest.fixture(scope="module")
def client(models, tmp_path_factory):
    with serving(models, tmp_path_factory.mktemp("served")) as client:
        yield client


@pytest.fixture(scope="module")
def teacher(models):
    return load(ModelConfig(model=str(models / "teacher"), device="cpu")).language_model


def expected(model, tokens):
    """Return [N, V] by the model's own forward."""
    with torch.no_grad():
        logits = model.model(torch.tensor([tokens])).logits[0, :, : model.vocab_size]
    return torch.log_softmax(logits.float(), dim=-1)


def tensor(message):
    return floats(message.dense).reshape(tuple(message.shape))


# Scoring


def test_prompt_logprobs_are_the_models_own_whatever_the_temperature(client, teacher):
    found = client.sample(
        PROMPT, max_tokens=1, temperature=0.5, base_model="teacher", prompt_logprobs=True
    )
    whole = expected(teacher, PROMPT)[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    answer = floats(found.prompt_logprobs)
    assert np.isnan(answer[0])
    assert answer[1:] == pytest.approx(whole.numpy(), abs=1e-5)
    assert len(found.sequences) == 1


def test_the_last_tokens_alone_can_be_scored(client, teacher):
    whole = floats(
        client.sample(
            PROMPT, max_tokens=1, base_model="teacher", prompt_logprobs=True
        ).prompt_logprobs
    )
    last = client.sample(
        PROMPT,
        max_tokens=1,
        base_model="teacher",
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=2,
    )
    answer = floats(last.prompt_logprobs)
    assert np.isnan(answer[:4]).all()
    assert answer[4:] == pytest.approx(whole[4:], abs=1e-5)
    table = floats(last.topk_prompt_logprobs.logprobs).reshape(6, 2)
    assert (table[:4] == -99999.0).all() and (table[4:] > -50).all()


def test_the_likeliest_tokens_of_every_position(client, teacher):
    found = client.sample(
        PROMPT, max_tokens=1, base_model="teacher", prompt_logprobs=True, topk_prompt_logprobs=3
    )
    table = found.topk_prompt_logprobs
    top = expected(teacher, PROMPT)[:-1].topk(3)
    ids = np.frombuffer(table.token_ids, dtype="<i4").reshape(6, 3)
    assert (table.length, table.k) == (6, 3)
    assert ids[1:].tolist() == top.indices.tolist() and ids[0].tolist() == [0, 0, 0]
    assert floats(table.logprobs).reshape(6, 3)[1:] == pytest.approx(top.values.numpy(), abs=1e-5)


def test_named_tokens_dense_and_sparse(client, teacher):
    named = [[1, -1], [2, 3], [-1, -1], [5, 4], [2, 1]]
    whole = expected(teacher, PROMPT)[:-1]
    wanted = (
        whole.gather(-1, torch.tensor(named).clamp_min(0))
        .masked_fill(torch.tensor(named) < 0, 0.0)
        .numpy()
    )
    dense = {"data": [id for row in named for id in row], "dtype": "int64", "shape": [5, 2]}
    found = client.sample(PROMPT, max_tokens=1, base_model="teacher", target_prompt_logprobs=dense)
    assert tensor(found.target_prompt_logprobs) == pytest.approx(wanted, abs=1e-5)
    sparse = {
        "data": [1, 2, 3, 5, 4, 2, 1],
        "dtype": "int64",
        "shape": [5, 2],
        "sparse_crow_indices": [0, 1, 3, 3, 5, 7],
        "sparse_col_indices": [0, 0, 1, 0, 1, 0, 1],
    }
    found = client.sample(
        PROMPT, max_tokens=1, base_model="teacher", target_prompt_logprobs=sparse
    ).target_prompt_logprobs
    assert floats(found.sparse_csr.values) == pytest.approx(wanted[np.array(named) >= 0], abs=1e-5)
    assert (
        np.frombuffer(found.sparse_csr.crow_indices, dtype="<i8").tolist()
        == sparse["sparse_crow_indices"]
    )


def test_named_tokens_of_the_last_position_score_no_more_than_that(client, teacher):
    named = {"data": [-1, -1, -1, -1, 4], "dtype": "int64", "shape": [5, 1]}
    found = client.sample(PROMPT, max_tokens=1, base_model="teacher", target_prompt_logprobs=named)
    assert tensor(found.target_prompt_logprobs)[:, 0] == pytest.approx(
        [0, 0, 0, 0, expected(teacher, PROMPT)[4, 4].item()], abs=1e-5
    )
    assert not found.prompt_logprobs
    assert "teacher: 1 requests, scored 1 tokens" in client.said[-1]


def test_draws_at_every_position_are_the_same_whatever_else_is_asked(client, teacher):
    asked = {"max_tokens": 1, "base_model": "teacher", "prompt_alt_tokens_k": 3, "seed": 5}
    alone = client.sample(PROMPT, **asked).prompt_alt_tokens
    also = client.sample(
        PROMPT, prompt_logprobs=True, topk_prompt_logprobs=2, **asked
    ).prompt_alt_tokens
    assert alone.tokens.dense == also.tokens.dense
    ids = np.frombuffer(alone.tokens.dense, dtype="<i4").reshape(5, 3)
    natural = expected(teacher, PROMPT)[:-1].gather(-1, torch.tensor(ids.astype("int64"))).numpy()
    assert tensor(alone.logprobs) == pytest.approx(natural, abs=1e-5)


# Sampling


def test_samples_are_those_of_the_library_with_the_seeds_of_the_request(client, teacher, models):
    found = client.sample(
        PROMPT, seed=7, num=3, max_tokens=5, temperature=0.8, base_model="teacher"
    )
    renderer = load(ModelConfig(model=str(models / "teacher"), device="cpu")).renderer
    requests = [SampleRequest(tuple(PROMPT), seed) for seed in (7, seed_of(7, 1), seed_of(7, 2))]
    own = LocalSampler(teacher).sample(
        requests, SamplingParams(5, temperature=0.8, stop_ids=renderer.stop_ids)
    )
    for sequence, sample in zip(found.sequences, own, strict=True):
        assert np.frombuffer(sequence.tokens, dtype="<i4").tolist() == sample.tokens.tolist()
        assert floats(sequence.logprobs) == pytest.approx(
            sample.sampling_logprobs.numpy(), abs=1e-5
        )
        assert sequence.stop_reason == (sample.stop_reason == "length")


def test_what_is_sampled_and_scored_does_not_depend_on_the_batch(client):
    asked = [
        {"seed": n, "max_tokens": 3 + n % 2, "num": 2, "base_model": "teacher"} for n in range(6)
    ]
    scored = {
        "seed": 1,
        "max_tokens": 1,
        "base_model": "teacher",
        "prompt_logprobs": True,
        "prompt_alt_tokens_k": 2,
    }
    alone = [client.sample(PROMPT[: 2 + n % 3], **one) for n, one in enumerate(asked)] + [
        client.sample(PROMPT, **scored)
    ]
    with client.held():
        replies = [client.ask(PROMPT[: 2 + n % 3], **one) for n, one in enumerate(asked)] + [
            client.ask(PROMPT, **scored)
        ]
    for reply, one in zip(replies, alone, strict=True):
        together = load_messages().SampleResponse()
        together.ParseFromString(client.wait(reply))
        assert [s.tokens for s in together.sequences] == [s.tokens for s in one.sequences]
        assert together.prompt_alt_tokens.tokens.dense == one.prompt_alt_tokens.tokens.dense
        assert floats(together.prompt_logprobs) == pytest.approx(
            floats(one.prompt_logprobs), abs=1e-5, nan_ok=True
        )
    assert any("6 requests, wrote" in line for line in client.said)


def test_stops_are_tokens_or_texts_or_none_at_all(client, models):
    tokenizer = load(ModelConfig(model=str(models / "teacher"), device="cpu")).renderer.tokenizer
    everything = list(range(len(tokenizer)))
    assert (
        len(
            client.sample(PROMPT, base_model="teacher", max_tokens=9, stop=everything)
            .sequences[0]
            .tokens
        )
        == 4
    )
    endless = client.sample(PROMPT, base_model="teacher", max_tokens=9, num=4, stop=[])
    assert all(len(s.tokens) == 36 and s.stop_reason == 1 for s in endless.sequences)
    free = [np.frombuffer(s.tokens, dtype="<i4").tolist() for s in endless.sequences]
    letter = next(t for t in free[0] if tokenizer.decode([t]).strip())
    text = tokenizer.decode([letter])
    cut = client.sample(PROMPT, base_model="teacher", max_tokens=9, num=4, stop=text)
    for whole, sequence in zip(free, cut.sequences, strict=True):
        tokens = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
        stops = [n for n, t in enumerate(whole) if text in tokenizer.decode([t])]
        assert tokens == whole[: stops[0] + 1] if stops else whole


def test_the_likeliest_tokens_at_each_drawn_one(client, teacher):
    found = client.sample(
        PROMPT, base_model="teacher", num=2, max_tokens=3, stop=[], topk_sample_logprobs=2
    )
    for sequence in found.sequences:
        tokens = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
        top = expected(teacher, PROMPT + tokens)[len(PROMPT) - 1 : -1].topk(2)
        table = sequence.topk_sampled_logprobs
        assert (
            np.frombuffer(table.token_ids, dtype="<i4").reshape(3, 2).tolist()
            == top.indices.tolist()
        )


def test_greedy_samples_come_with_the_models_own_logprobs(client, teacher):
    sequence = client.sample(PROMPT, base_model="teacher", temperature=0, max_tokens=1).sequences[0]
    best = expected(teacher, PROMPT)[-1].max(dim=-1)
    assert np.frombuffer(sequence.tokens, dtype="<i4").tolist() == [best.indices.item()]
    assert floats(sequence.logprobs) == pytest.approx([best.values.item()], abs=1e-5)


def test_a_request_draws_only_so_many_tokens(client):
    error = client.post(
        "asample",
        400,
        **{**ASKED, "sampling_params": {"max_tokens": 4096}},
        num_samples=1000,
        base_model="teacher",
    )["error"]
    assert error == (
        "num_samples 1000 times max_tokens 4096 is more than the 2097152 tokens that a request may draw; ask for at most 512 "
        "samples, or for the rest in other requests"
    )


def test_a_small_request_does_not_wait_for_a_large_one_and_a_running_one_can_be_cancelled(client):
    alone = client.sample(PROMPT, base_model="teacher", max_tokens=2, stop=[], seed=5)
    large = client.ask(PROMPT, base_model="teacher", num=1024, max_tokens=400, stop=[])
    again = client.sample(PROMPT, base_model="teacher", max_tokens=2, stop=[], seed=5)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in alone.sequences]
    assert not client.service.futures.get(large["request_id"]).done()
    client.post("cancel_future", request_id=large["request_id"])
    with pytest.raises(VerifierFailed, match="the request was cancelled"):
        client.wait(large)
    client.sample(PROMPT, base_model="teacher", num=600, max_tokens=2)


def test_a_prompt_may_fill_the_context_when_it_is_scored(client):
    assert floats(
        client.sample(
            [1] * 512, max_tokens=1, base_model="teacher", prompt_logprobs=True
        ).prompt_logprobs
    ).shape == (512,)
    with pytest.raises(
        VerifierFailed,
        match="512 tokens of prompt and max_tokens 2 do not fit in the context of 512",
    ):
        client.sample([1] * 512, max_tokens=2, base_model="teacher")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"tokens": []}, "the prompt has 0 tokens, and the model reads 1 to 512"),
        ({"tokens": [1, 99]}, "prompt: token 99 is not one of the 11 of the vocabulary"),
        ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n is 3: it needs prompt_logprobs"),
        ({"stop": ["x", ""]}, "stop holds an empty text"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
            r"target_prompt_logprobs has the shape \[1, 1\], not \[5, K\]",
        ),
        (
            {"target_prompt_logprobs": {"data": [1] * 5, "dtype": "int64", "shape": [5, 2]}},
            r"target_prompt_logprobs has 5 values, which do not fit the shape \[5, 2\]",
        ),
        (
            {"target_prompt_logprobs": {"data": [99] * 5, "dtype": "int64", "shape": [5, 1]}},
            "names tokens that are not among the 11 of the vocabulary",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_question_that_makes_no_sense_fails_alone(client, asked, text):
    prompt = asked.pop("tokens", PROMPT)
    prompt_logprobs = "prompt_logprobs_last_n" not in asked and "stop" not in asked
    good = client.ask(PROMPT, base_model="teacher", prompt_logprobs=prompt_logprobs)
    bad = client.ask(
        prompt,
        base_model="teacher",
        **({"prompt_logprobs": True} if prompt_logprobs else {}),
        **asked,
    )
    with pytest.raises(VerifierFailed, match=text):
        client.wait(bad)
    client.wait(good)


# Training

SEQUENCE = {"tokens": [1, 2, 3, 4], "target_tokens": [2, 3, 4, 1]}
DRAWN = {**SEQUENCE, "logprobs": [-1.0, -2.0, -3.0, -1.5], "advantages": [0.0, 1.0, -0.5, 2.0]}


def test_losses_are_those_of_functional(client):
    model = client.model(number=1)
    student = client.train(
        model, [{**SEQUENCE, "weights": [0.0] * 4}], "cross_entropy", forward_only=True
    )
    own = torch.tensor(logprobs(student)[0])
    sampler, advantages = torch.tensor(DRAWN["logprobs"]), torch.tensor(DRAWN["advantages"])
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        loss = F.POLICY_LOSSES[name].function(own, sampler, advantages).sum().item()
        found = client.train(model, [DRAWN, DRAWN], name)
        assert found.metrics["loss:sum"] == pytest.approx(2 * loss, abs=1e-4)
        assert logprobs(found)[1] == pytest.approx(own.numpy(), abs=1e-5)
    clipped = F.ppo(own, sampler, advantages, 0.99, 1.01).sum().item()
    found = client.train(model, [DRAWN], "ppo", clip_low_threshold=0.99, clip_high_threshold=1.01)
    assert found.metrics["loss:sum"] == pytest.approx(clipped, abs=1e-4)


def test_one_ratio_for_a_text_whatever_the_pieces_it_is_read_in(client, monkeypatch):
    datum = {**DRAWN, "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0]}
    bounds = {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}
    norms, sums = [], []
    for chunk, number in ((2, 20), (100, 21)):
        model = client.model(number=number)
        trainer = client.service._models[model].trainer.trainer
        monkeypatch.setattr(trainer, "limits", replace(trainer.limits, chunk_tokens=chunk))
        found = client.train(model, [datum, datum], "gspo", **bounds)
        sums.append(found.metrics["loss:sum"])
        norms.append(client.step(model)["metrics"]["grad_norm"])
    own = torch.tensor(logprobs(found)[0], requires_grad=True)
    inputs = [
        torch.tensor(datum[name]) for name in ("logprobs", "advantages", "sequence_ratio_mask")
    ]
    loss = F.gspo(own, *inputs, **bounds).sum()
    assert sums == pytest.approx([2 * loss.item()] * 2, abs=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0
    # Check that the same log-probabilities, weighted by the derivative of the whole text's loss, give the same gradient.
    (weights,) = torch.autograd.grad(loss, own)
    model = client.model(number=22)
    twin = {**SEQUENCE, "weights": (-weights).tolist()}
    client.train(model, [twin, twin], "cross_entropy")
    assert client.step(model)["metrics"]["grad_norm"] == pytest.approx(norms[0], rel=1e-4)


def test_a_mask_multiplies_the_loss_and_weights_may_be_left_out(client):
    model = client.model(number=23)
    weighted = client.train(
        model, [{**SEQUENCE, "weights": [1.0] * 4}], "cross_entropy", forward_only=True
    )
    plain = client.train(model, [SEQUENCE], "cross_entropy", forward_only=True)
    assert plain.metrics["loss:sum"] == weighted.metrics["loss:sum"]
    masked = client.train(
        model, [{**SEQUENCE, "mask": [0.0, 1.0, 0.0, 0.5]}], "cross_entropy", forward_only=True
    )
    own = logprobs(plain)[0]
    assert masked.metrics["loss:sum"] == pytest.approx(-own[1] - 0.5 * own[3], abs=1e-5)
    without = {**DRAWN, "mask": [0.0, 1.0, 0.0, 1.0]}
    dropped = {**DRAWN, "advantages": [0.0, 1.0, 0.0, 2.0]}
    sums = [client.train(model, [datum], "ppo").metrics["loss:sum"] for datum in (without, dropped)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-5)


def test_clients_in_other_processes_number_their_requests_from_very_far(client):
    sampler = client.sampler(80, base_model="teacher")
    for number in (10**18, 2**63 - 1):
        assert len(client.sample(PROMPT, sampling_session_id=sampler, seq_id=number).sequences) == 1
    error = client.post("asample", 400, **ASKED, sampling_session_id=sampler, seq_id=2**63)["error"]
    assert error.startswith(
        "SampleBody: seq_id: Input should be less than or equal to 9223372036854775807"
    )


def test_stability_info_is_refused_with_what_to_write_instead(client):
    error = client.post("asample", 400, **ASKED, base_model="teacher", record_stability_info=True)[
        "error"
    ]
    assert error.startswith(
        "loss_fn stable_reinforce and its record_stability_info are not computed here"
    )
    client.sample(PROMPT, base_model="teacher", record_stability_info=False)


def test_several_targets_at_a_token_and_texts_with_differing_numbers_of_them(client):
    model = client.model(number=2)
    wide = {
        "tokens": [1, 2],
        "target_tokens": [[2, 3], [3, 1]],
        "weights": [[0.5, 0.5], [0.0, 1.0]],
    }
    found = client.train(model, [wide, {**SEQUENCE, "weights": [1.0] * 4}, wide], "cross_entropy")
    first, narrow, last = logprobs(found)
    assert first.shape == (2, 2) and narrow.shape == (4,)
    assert first == pytest.approx(last, abs=1e-6)
    weights = np.array(wide["weights"])
    assert found.metrics["loss:sum"] == pytest.approx(
        -2 * (first * weights).sum() - narrow.sum(), abs=1e-4
    )


def test_training_learns_and_a_sampler_of_its_weights_says_so(client):
    model = client.model(number=3)
    datum = {**SEQUENCE, "weights": [1.0] * 4}
    losses = []
    for _ in range(6):
        losses.append(client.train(model, [datum], "cross_entropy").metrics["loss:sum"])
        metrics = client.step(model, 0.02)["metrics"]
    assert losses[-1] < 0.9 * losses[0]
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    reply = client.post(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=client.number(model),
        sampling_session_seq_id=50,
    )
    snapshot = client.wait(reply)["sampling_session_id"]
    named = client.sampler(51, model_path=client.save(model, "now", "save_weights_for_sampler"))
    text = [1, 2, 3, 4, 1]
    after = client.train(model, [datum], "cross_entropy", forward_only=True)
    for sampler in (snapshot, named):
        found = floats(
            client.sample(
                text, max_tokens=1, sampling_session_id=sampler, prompt_logprobs=True
            ).prompt_logprobs
        )
        assert found[1:] == pytest.approx(logprobs(after)[0], abs=1e-5)
    client.train(model, [datum], "cross_entropy")
    client.step(model, 0.5)
    again = floats(
        client.sample(
            text, max_tokens=1, sampling_session_id=snapshot, prompt_logprobs=True
        ).prompt_logprobs
    )
    assert again == pytest.approx(found, abs=1e-6, nan_ok=True)
    base = floats(
        client.sample(
            text, max_tokens=1, base_model="student", prompt_logprobs=True
        ).prompt_logprobs
    )
    assert np.abs(base[1:] - found[1:]).max() > 0.01
    info = client.http.get(f"{V1}/samplers/{named}").json()
    assert info["base_model"] == "student" and info["model_path"].endswith("/sampler_weights/now")


def test_samplers_in_flight_follow_what_their_model_publishes(client):
    model = client.model(number=24)
    text, datum = [1, 2, 3, 4, 1], {**SEQUENCE, "weights": [1.0] * 4}

    def publish(number):
        reply = client.post(
            "save_weights_for_sampler",
            model_id=model,
            seq_id=client.number(model),
            sampling_session_seq_id=number,
            kind="inflight",
        )
        return client.wait(reply)["sampling_session_id"]

    def read(sampler):
        answer = client.sample(
            text, max_tokens=1, sampling_session_id=sampler, prompt_logprobs=True
        )
        return floats(answer.prompt_logprobs)[1:]

    first = publish(100)
    snapshot = client.wait(
        client.post(
            "save_weights_for_sampler",
            model_id=model,
            seq_id=client.number(model),
            sampling_session_seq_id=101,
        )
    )["sampling_session_id"]
    before = read(first)
    samplers = [first]
    for number in range(102, 108):
        client.train(model, [datum], "cross_entropy")
        client.step(model, 0.05)
        samplers.append(publish(number))
    now = logprobs(client.train(model, [datum], "cross_entropy", forward_only=True))[0]
    assert np.abs(now - before).max() > 0.01
    for sampler in (samplers[0], samplers[3], samplers[-1]):
        assert read(sampler) == pytest.approx(now, abs=1e-5)
    assert read(snapshot) == pytest.approx(before, abs=1e-5)


def test_a_request_sent_twice_is_done_once(client):
    model = client.model(number=4)
    message = client.train_request(model, [{**SEQUENCE, "weights": [1.0] * 4}], "cross_entropy", {})
    one, two = (client.train_bytes(message.SerializeToString()) for _ in range(2))
    assert one == two
    norm = client.step(model)["metrics"]["grad_norm"]
    other = client.model(number=5)
    client.train(other, [{**SEQUENCE, "weights": [1.0] * 4}], "cross_entropy")
    assert client.step(other)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_gradients_add_up_over_requests_and_are_clipped_where_that_is_asked(client):
    datum = {**SEQUENCE, "weights": [1.0] * 4}
    one, two = client.model(number=6), client.model(number=7)
    for _ in range(2):
        client.train(one, [datum], "cross_entropy")
    client.train(two, [datum, datum], "cross_entropy")
    norms = [client.step(model, grad_clip_norm=0.1)["metrics"]["grad_norm"] for model in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    results = [
        client.train(model, [datum], "cross_entropy", forward_only=True).metrics["loss:sum"]
        for model in (one, two)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_step_from_nothing_moves_nothing(client):
    """Check updates without any gradient and with zeros: momentum and weight decay would move the weights."""
    model = client.model(number=25)
    datum = {**SEQUENCE, "weights": [1.0] * 4}
    client.train(model, [datum], "cross_entropy")
    client.step(model, 0.02)

    def loss():
        return client.train(model, [datum], "cross_entropy", forward_only=True).metrics["loss:sum"]

    before = loss()
    assert client.step(model, 0.02, weight_decay=0.1)["metrics"]["empty_updates"] == 1.0
    client.train(model, [{**SEQUENCE, "weights": [0.0] * 4}], "cross_entropy")
    client.train(model, [{**DRAWN, "advantages": [0.0] * 4}], "ppo")
    assert client.step(model, 0.02, weight_decay=0.1)["metrics"]["empty_updates"] == 1.0
    assert loss() == before
    client.train(model, [datum], "cross_entropy")
    assert client.step(model, 0.02)["metrics"]["empty_updates"] == 0.0
    assert loss() != before


def test_two_models_over_one_base_do_not_disturb_each_other(client):
    datum = {**SEQUENCE, "weights": [1.0] * 4}
    still, moving = client.model(number=8), client.model(number=9, rank=2, train_mlp=False)
    before = client.train(still, [datum], "cross_entropy", forward_only=True).metrics["loss:sum"]
    client.train(moving, [datum], "cross_entropy")
    client.step(moving, 0.1)
    assert (
        client.train(still, [datum], "cross_entropy", forward_only=True).metrics["loss:sum"]
        == before
    )
    assert (
        client.train(moving, [datum], "cross_entropy", forward_only=True).metrics["loss:sum"]
        != before
    )


BROKEN = [
    (
        {"loss": "grpo"},
        "loss_fn 'grpo' is not computed here; there are cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
    ),
    (
        {"loss": "stable_reinforce"},
        "the loss's definition is not public; set loss_fn=importance_sampling, ppo",
    ),
    (
        {"loss": "gspo", "datum": {**DRAWN, "sequence_ratio_mask": [0.0] * 4}},
        "datum 0: sequence_ratio_mask marks no token; mark the sampled tokens",
    ),
    (
        {"datum": {**DRAWN, "mask": [1.0]}},
        r"datum 0: mask has the shape \[1\], target_tokens \[4\]",
    ),
    (
        {"config": {"epsilon": 0.2}},
        "loss_fn_config of importance_sampling: no number is named 'epsilon'; there are: none",
    ),
    (
        {"datum": {**SEQUENCE, "logprobs": [0.0] * 4}},
        "datum 0: importance_sampling is computed from advantages, logprobs, target_tokens",
    ),
    (
        {"datum": {**DRAWN, "target_tokens": [2, 3]}},
        r"datum 0: target_tokens has the shape \[2\], not \[4\].* for 4 tokens",
    ),
    (
        {"datum": {**DRAWN, "advantages": [1.0]}},
        r"datum 0: advantages has the shape \[1\], target_tokens \[4\]",
    ),
    (
        {"datum": {**DRAWN, "tokens": [1, 2, 3, 77]}},
        "datum 0: model_input: token 77 is not one of the 11",
    ),
    (
        {"datum": {**DRAWN, "target_tokens": [2, 3, 4, -1]}},
        "datum 0: target_tokens are not all below the vocabulary of 11",
    ),
    (
        {"datum": {**DRAWN, "advantages": [float("nan")] * 4}},
        "datum 0: its loss is nan, not a number",
    ),
    ({"data": []}, "the request has no data; send at least one datum"),
]


@pytest.mark.parametrize(("broken", "text"), BROKEN, ids=[text[:40] for _, text in BROKEN])
def test_what_cannot_be_trained_on_is_named(client, broken, text):
    model = client.model(number=10)
    client.numbers.setdefault(model, 0)
    data = broken.get("data", [broken.get("datum", DRAWN)])
    with pytest.raises(VerifierFailed, match=text):
        client.train(
            model, data, broken.get("loss", "importance_sampling"), **broken.get("config", {})
        )


def test_what_there_is(client):
    assert (
        client.http.get("/healthz").json()
        == {"status": "ok"}
        == client.http.get(f"{V1}/healthz").json()
    )
    rows = {
        row["model_name"]: row
        for row in client.http.get(f"{V1}/get_server_capabilities").json()["supported_models"]
    }
    assert rows["student"]["trainable"] and not rows["teacher"]["trainable"]
    assert rows["teacher"]["sampleable"]
    assert client.post("client/config", sdk_version="0.38.0")["proto_compress_fwdbwd"] is False
    assert client.post("telemetry", anything=1) == {"status": "accepted"}
    assert client.post("session_heartbeat", session_id=client.session) == {
        "type": "session_heartbeat"
    }
    info = client.post("get_info", model_id=client.model(number=11))
    assert (
        info["model_data"]["model_name"] == "student"
        and info["lora_rank"] == 4
        and info["model_data"]["arch"] == "llama"
    )


REFUSED = [
    (
        "create_model",
        {"base_model": "nobody"},
        404,
        "no model 'nobody' is served here; there are student, teacher",
    ),
    ("create_model", {"base_model": "../../etc"}, 404, "no model '../../etc' is served here"),
    (
        "create_model",
        {"base_model": "teacher"},
        400,
        "teacher only samples and scores here; to be trained are student",
    ),
    (
        "create_model",
        {"lora_config": None},
        400,
        "lora_config is missing: only adapters are trained here",
    ),
    (
        "create_model",
        {"lora_config": {"rank": 0}},
        400,
        "CreateModel: lora_config.rank: Input should be greater than or equal to 1",
    ),
    (
        "create_model",
        {"optimizer_config": {"type": "dimuon"}},
        400,
        "CreateModel: optimizer_config.type: String should match",
    ),
    (
        "create_model",
        {"session_id": "gone"},
        410,
        "the session has ended or belongs to an earlier server",
    ),
    ("create_model", {"more": 1}, 400, "CreateModel: more: Extra inputs are not permitted"),
    (
        "create_model",
        {"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}},
        400,
        "train_attn and train_mlp are both off",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "status", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED]
)
def test_a_model_that_cannot_be_made_is_refused(client, name, changes, status, text):
    body = {
        "session_id": client.session,
        "model_seq_id": 77,
        "base_model": "student",
        "lora_config": {"rank": 2},
    }
    assert client.post(name, status, **{**body, **changes})["error"].startswith(text)


def test_what_is_not_there_is_named(client):
    for path in (
        "tinker://nobody:train:0/weights/a",
        f"tinker://{client.session}:train:0/weights/none",
    ):
        assert (
            "there is no checkpoint" in client.post("weights_info", 404, tinker_path=path)["error"]
        )
    for path in (
        "tinker://x/../../etc/passwd",
        "file:///etc/passwd",
        "tinker://a:train:0/weights/../../x",
    ):
        assert (
            "is not the address of a checkpoint here"
            in client.post("weights_info", 400, tinker_path=path)["error"]
        )
    assert (
        "there is no training model" in client.post("get_info", 404, model_id="x:train:0")["error"]
    )
    assert "there is no request" in client.post("retrieve_future", 404, request_id="x")["error"]
    assert "there is no training run" in client.http.get(f"{V1}/training_runs/x").json()["error"]
    asked = {"prompt": {"chunks": []}, "sampling_params": {}}
    assert (
        "there is no sampling session"
        in client.post("asample", 410, sampling_session_id="x", **asked)["error"]
    )
    assert "name a base_model or a model_path" in client.post("asample", 400, **asked)["error"]


def test_images_are_refused_in_both_protocols(client):
    chunk = {"type": "image", "data": "", "format": "png"}
    error = client.post(
        "asample", 400, prompt={"chunks": [chunk]}, sampling_params={}, base_model="teacher"
    )["error"]
    assert error.startswith("SampleBody: prompt.chunks.0")
    message = client.train_request(
        client.model(number=12), [{**SEQUENCE, "weights": [1.0] * 4}], "cross_entropy", {}
    )
    message.data[0].model_input.add().image.format = "png"
    headers = {"content-type": "application/x-protobuf"}
    response = client.http.post(
        f"{V1}/forward_backward", content=message.SerializeToString(), headers=headers
    )
    assert (
        response.status_code == 400
        and "datum 0: images and audio are not read here" in response.json()["error"]
    )
