"""On-policy distillation on one page, without the library around it: `python examples/minimal.py`.

A tiny student answers prompts; a tiny teacher gives its distribution at every token of the answer; the student learns
reverse KL on exactly those tokens. What `practicum` adds is everything else: batching, chunks, other divergences and
signals, other teachers, resume, evaluation. A test proves that its first steps are these.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from practicum import functional as F

VOCABULARY, STOP, LONGEST, BLOCK = 24, 1, 12, 64


def build_tiny_model(seed: int, hidden: int) -> LlamaForCausalLM:
    """A two-layer Llama with random weights."""
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
def sample_answer(model: LlamaForCausalLM, prompt: list[int], seed: int) -> list[int]:
    """Sample one token after another until the stop token: the first to arrive, each at the rate of its probability.

    The arrivals come from the answer's own random stream; the library races blocks of 64 tokens first, of which this is one.
    """
    stream = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < LONGEST:
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        arrivals = torch.empty(1 + BLOCK, dtype=torch.float64).exponential_(generator=stream)[
            1 : 1 + VOCABULARY
        ]
        tokens.append(int((arrivals / torch.softmax(logits, dim=-1)).argmin()))
        if tokens[-1] == STOP:
            break
    return tokens


def compute_logprobs(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> Tensor:
    """The model's log-probabilities at each token of the answer, [T, V]."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def distil(
    student: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    seeds: list[int],
) -> float:
    """One step: sample, score, differentiate, update. Returns the mean reverse KL a token."""
    answers = [
        sample_answer(student, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    count = sum(len(tokens) for tokens in answers)
    total = 0.0
    optimizer.zero_grad()
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.no_grad():
            target = compute_logprobs(teacher, prompt, tokens)
        divergence = F.reverse_kl(compute_logprobs(student, prompt, tokens), target).sum()
        (divergence / count).backward()
        total += divergence.item()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return total / count


def main() -> None:
    """Forty steps of eight prompts; the divergence falls."""
    student, teacher = build_tiny_model(1, 32), build_tiny_model(2, 48)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, VOCABULARY, (8, 4), generator=generator).tolist()
    for step in range(1, 41):
        seeds = [1000 * step + place for place in range(len(prompts))]
        divergence = distil(student, teacher, optimizer, prompts, seeds)
        if step % 5 == 0 or step == 1:
            print(f"step {step:2d}  reverse KL {divergence:.3f} nats a token")


if __name__ == "__main__":
    main()
