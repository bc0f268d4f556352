"""A client's calls with the unchanged tinker package: runs in a separate process, and prints one JSON object.

python sdk_client.py CHECKPOINT|-     (TINKER_BASE_URL and TINKER_API_KEY give the server)
"""

import json
import sys

import tinker
import torch
from tinker import types

PROMPT = [1, 4, 2, 3, 5, 2]
TEXT = [1, 2, 3, 4]


def main(resume: str) -> None:
    client = tinker.ServiceClient()
    if resume == "-":
        found = scores(client) | trained(client)
    else:
        found = {
            "resumed": losses(
                client.create_training_client_from_state_with_optimizer(resume).result(), 2
            )
        }
    client.close("success").result()
    print(json.dumps(found))


def scores(client: tinker.ServiceClient) -> dict:
    teacher = client.create_sampling_client(base_model="teacher").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    drawn = [
        teacher.sample(prompt, 2, types.SamplingParams(max_tokens=5, seed=3, stop=[]))
        for _ in range(4)
    ]
    tokens = [[sequence.tokens for sequence in one.result().sequences] for one in drawn]
    named = torch.tensor([[1, -1], [-1, -1], [2, 3], [-1, -1], [4, 1]])
    dense, sparse = (
        teacher.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
            target_prompt_logprobs=target,
            prompt_alt_tokens_k=2,
        ).result()
        for target in (
            types.TensorData.from_torch(named),
            types.TensorData.from_torch_sparse(named, pad_value=-1),
        )
    )
    return {
        "same_seed": all(one == tokens[0] for one in tokens),
        "lengths": [len(sequence) for sequence in tokens[0]],
        "prompt_logprobs": teacher.compute_logprobs(prompt).result(),
        "last": teacher.compute_logprobs(prompt, prompt_logprobs_last_n=2).result(),
        "topk": dense.topk_prompt_logprobs,
        "sample_topk": len(dense.sequences[0].topk_logprobs),
        "dense": dense.target_prompt_logprobs.to_torch().tolist(),
        "sparse": sparse.target_prompt_logprobs.to_torch().tolist(),
        "alternatives": list(dense.prompt_alt_tokens.tokens.to_torch().shape),
        "base": teacher.get_base_model(),
    }


def losses(training: tinker.TrainingClient, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        inputs = {"target_tokens": torch.tensor([2, 3, 4, 1]), "weights": torch.ones(4)}
        gradient = training.forward_backward([datum(inputs)], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.02))
        found.append(gradient.result().metrics["loss:sum"])
        step.result()
    return found


def datum(inputs: dict) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(TEXT), loss_fn_inputs=inputs)


def trained(client: tinker.ServiceClient) -> dict:
    training = client.create_lora_training_client(base_model="student", rank=4, seed=0).result()
    first = losses(training, 2)
    path = training.save_state("half").result().path
    whole = first + losses(training, 2)
    drawn = {
        "target_tokens": torch.tensor([2, 3, 4, 1]),
        "logprobs": torch.tensor([-1.0, -2.0, -3.0, -1.5]),
        "advantages": torch.tensor([0.0, 1.0, -0.5, 2.0]),
    }
    names = ("importance_sampling", "ppo", "cispo", "dro")
    sums = {
        name: training.forward([datum(drawn)], name).result().metrics["loss:sum"] for name in names
    }
    wide = {
        "target_tokens": torch.tensor([[2, 3], [3, 1], [4, 2], [1, 5]]),
        "weights": torch.full((4, 2), 0.5),
    }
    several = training.forward([datum(wide), datum(wide)], "cross_entropy").result()
    own = training.forward([datum(drawn)], "ppo").result().loss_fn_outputs[0]["logprobs"].to_torch()

    def custom(data, logprobs):
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"mine": loss.item()}

    inputs = {"target_tokens": torch.tensor([2, 3, 4, 1]), "weights": torch.ones(4)}
    mine = training.forward_backward_custom([datum(inputs)], custom).result().metrics
    snapshot = training.save_weights_and_get_sampling_client().result()
    saved = client.create_sampling_client(
        model_path=training.save_weights_for_sampler("now").result().path
    ).result()
    text = types.ModelInput.from_ints([*TEXT, 1])
    failures = []
    for attempt in (
        lambda: client.create_sampling_client(base_model="nobody").result(),
        lambda: training.forward([datum(drawn)], "stable_reinforce").result(),
        lambda: client.create_lora_training_client(base_model="teacher").result(),
    ):
        try:
            attempt()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    rest = client.create_rest_client()
    return {
        "whole": whole,
        "path": path,
        "sums": sums,
        "own": own.tolist(),
        "wide": [list(output["logprobs"].shape) for output in several.loss_fn_outputs],
        "custom": mine,
        "snapshot": snapshot.compute_logprobs(text).result()[1:],
        "saved": saved.compute_logprobs(text).result()[1:],
        "failures": failures,
        "run": rest.get_training_run_by_tinker_path(path).result().base_model,
        "checkpoints": [
            row.checkpoint_id
            for row in rest.list_checkpoints(training.model_id).result().checkpoints
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1])
