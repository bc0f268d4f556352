"""On-policy distillation in one file of plain PyTorch. Run it with `python examples/minimal.py`.

A tiny student answers prompts, a tiny teacher gives its distribution at every token of the answers, and the student
minimizes the reverse KL at exactly these tokens. The library adds batching, other divergences and signals, other
teachers, resume and evaluation. A test checks that the library computes the same loss and gradient.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from practicum import functional as F

VOCABULARY, STOP, MAX_NEW_TOKENS = 24, 1, 12


def build_tiny_model(seed: int, hidden: int) -> LlamaForCausalLM:
    """Build a two-layer Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def sample_answer(
    model: LlamaForCausalLM, prompt: list[int], generator: torch.Generator
) -> list[int]:
    """Sample tokens from the model's distribution up to the stop token."""
    tokens: list[int] = []
    while len(tokens) < MAX_NEW_TOKENS:
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        probabilities = torch.softmax(logits, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if tokens[-1] == STOP:
            break
    return tokens


def compute_logprobs(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the model's log-probabilities at each token of an answer, [T, V]."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def compute_loss(
    student: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> Tensor:
    """Return the mean reverse KL per token of the answers."""
    total = torch.zeros(())
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.no_grad():
            target = compute_logprobs(teacher, prompt, tokens)
        total = total + F.reverse_kl(compute_logprobs(student, prompt, tokens), target).sum()
    return total / sum(map(len, answers))


def main() -> None:
    """Train for forty steps of eight prompts, and print the divergence."""
    student, teacher = build_tiny_model(1, 32), build_tiny_model(2, 48)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, VOCABULARY, (8, 4), generator=generator).tolist()
    for step in range(1, 41):
        answers = [sample_answer(student, prompt, generator) for prompt in prompts]
        loss = compute_loss(student, teacher, prompts, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 or step == 1:
            print(f"step {step:2d}  reverse KL {loss.item():.3f} nats per token")


if __name__ == "__main__":
    main()
