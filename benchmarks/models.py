"""Create the measured models: Llama shapes with random weights, in memory or as folders; lengths and prompts.

Only `build_language_model`, `build_sampler`, `build_trainer` and `metered` depend on how this library creates a model and samples
from it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.utils import logging

logging.disable_progress_bar()

END = "</s>"
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class ModelDims:
    """A Llama with tied embeddings: width, depth, heads, key-value heads, width of the feed-forward part, vocabulary."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Parameters of the layers."""
        head = self.width // self.heads
        attention = 2 * self.width * head * (self.heads + self.kv_heads)
        return (
            self.layers * (attention + 3 * self.width * self.feed_forward + 2 * self.width)
            + self.width
        )

    @property
    def head(self) -> int:
        """Parameters of the embedding, which is the head too."""
        return self.vocabulary * self.width

    @property
    def attended(self) -> int:
        """Multiplications of a query with a key, in all layers."""
        return self.layers * self.width

    @property
    def state_numbers(self) -> int:
        """Numbers of a token's keys and values, in all layers."""
        return 2 * self.layers * self.kv_heads * (self.width // self.heads)


SHAPES = {
    "toy": ModelDims(192, 6, 3, 3, 512, 4096),
    "toy-teacher": ModelDims(384, 6, 6, 3, 1024, 4096),
    "17m": ModelDims(256, 6, 4, 2, 704, 49152),
    "57m": ModelDims(512, 8, 8, 4, 2048, 49152),
    "135m": ModelDims(576, 30, 9, 3, 1536, 49152),
    "tiny": ModelDims(64, 2, 2, 1, 128, 512),
    "tiny-teacher": ModelDims(96, 2, 2, 1, 192, 512),
    "600m": ModelDims(1024, 28, 16, 8, 3072, 151936),
}


def build_config(shape: ModelDims) -> LlamaConfig:
    """The shape as settings of transformers."""
    made = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert isinstance(made, LlamaConfig)
    return made


def build_causal_lm(shape: ModelDims, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    """A model of transformers with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(build_config(shape)).eval().to(device)


def build_language_model(shape: ModelDims, seed: int = 0, device: str = "cpu"):  # type: ignore[no-untyped-def]
    """The same weights as this library's language model, which decodes as it does in a run."""
    from practicum.backends.local.language_model import LanguageModel
    from practicum.backends.local.packing import enable_packing
    from practicum.backends.local.trial import choose_decoding

    # In the order of loading: the compiled program is compared on packed texts.
    model = enable_packing(LanguageModel(build_causal_lm(shape, seed, device), shape.vocabulary))
    return replace(model, decoding=choose_decoding(model, "auto"))


def name_decoding(model) -> str:  # type: ignore[no-untyped-def]
    """Return how a language model decodes, so that a result shows if the compiled program was used."""
    return str(model.decoding)


def build_sampler(model, slots: int):  # type: ignore[no-untyped-def]
    """Create this library's sampler with this number of parallel sequences."""
    from practicum.backends.local.sampler import LocalSampler

    return LocalSampler(model, batch_size=slots)


def build_trainer(model, slots: int):  # type: ignore[no-untyped-def]
    """Create this library's trainer, which samples this number of sequences in parallel."""
    from practicum.backends.local.trainer import LocalTrainer, TrainerLimits

    return LocalTrainer(model, TrainerLimits(sampling_batch=slots))


@dataclass(slots=True)
class Meter:
    """The number of decode steps, the seconds of decoding, and the seconds before it, for weights and prompts."""

    steps: int = 0
    seconds: float = 0.0
    before: float = 0.0


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Within the block every drawing of this library's sampler is counted, and its preparations are."""
    from practicum.backends.local import sampler as engine
    from practicum.backends.local.decode_batch import SlotDecodeBatch

    meter, draw, opened, admit = (
        Meter(),
        engine.sample_tokens,
        engine.open_decode_batch,
        SlotDecodeBatch.admit,
    )

    def time_before(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return call(*arguments)
            finally:
                meter.before += time.process_time() - start

        return call_timed

    def draw_counted(*arguments: Any) -> Any:
        start = time.process_time()
        tokens = draw(*arguments)
        meter.steps += 1
        meter.seconds += time.process_time() - start
        return tokens

    engine.sample_tokens, engine.open_decode_batch, SlotDecodeBatch.admit = (
        draw_counted,
        time_before(opened),
        time_before(admit),
    )
    try:
        yield meter
    finally:
        engine.sample_tokens, engine.open_decode_batch, SlotDecodeBatch.admit = draw, opened, admit


def draw_prompts(
    count: int, vocabulary: int, seed: int = 0, shortest: int = 16, longest: int = 48
) -> list[tuple[int, ...]]:
    """Draw prompts of random tokens without padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        tuple(torch.randint(2, vocabulary, (length,), generator=generator).tolist())
        for length in lengths
    ]


def draw_stops(vocabulary: int, mean: int, seed: int = 0) -> frozenset[int]:
    """Draw stop tokens such that a model with random weights has geometric lengths with this mean."""
    generator = torch.Generator().manual_seed(seed)
    return frozenset(
        (torch.randperm(vocabulary - 2, generator=generator)[: vocabulary // mean] + 2).tolist()
    )


def compute_refill_bound(lengths: Sequence[int], slots: int) -> float:
    """The greatest share of the slots that can be at work: no order of answers of these lengths does better."""
    total = sum(lengths)
    return total / (slots * max(-(-total // slots), max(lengths)))


def count_batch_steps(lengths: Sequence[int], slots: int) -> int:
    """The decode steps of batches that wait for their longest answer."""
    return sum(max(lengths[start : start + slots]) for start in range(0, len(lengths), slots))


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words `w2`, `w3`, ... between spaces, one token each; 0 is padding and 1 the end."""
    words = {"<pad>": 0, END: 1, **{f"w{number}": number for number in range(2, vocabulary)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token=END,
        chat_template=TEMPLATE,
        padding_side="left",
    )


def render_words(tokens: Sequence[int]) -> str:
    """Return the text that the tokenizer of `build_tokenizer` reads as these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def write_folder(
    shape: ModelDims, folder: Path, seed: int, stops: frozenset[int] = frozenset()
) -> None:
    """The model with its tokenizer and its stop tokens, for anyone who loads folders."""
    model = build_causal_lm(shape, seed)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = sorted({1, *stops})
        model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    build_tokenizer(shape.vocabulary).save_pretrained(folder)
