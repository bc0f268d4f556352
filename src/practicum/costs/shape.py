"""The sizes of a model that decide its cost, and the floating-point operations that follow.

A multiplication and its addition are two operations, as in Kaplan et al. (2001.08361, section 2.1):
a token at context length c takes F(c) = 2 (N_b + N_h) + 4 L H h c operations forward, with N_b the
matrices of the layers, N_h the head, L layers of H heads of width h. Norms, activations, softmax
and the optimizer are left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.costs.segments import find_shared_prefixes


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes of a language model.

    `parameters` counts all of them; `body` the entries of the matrices that multiply every token
    once (in a mixture of experts only the experts that a token goes to); `adapters` the additional
    entries of low-rank adapters. `vocabulary` counts the real tokens: padding rows are never
    multiplied.
    """

    parameters: int
    body: int
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    adapters: int = 0

    @property
    def head(self) -> int:
        """The number of entries of the last linear map, N_h = vocabulary x width."""
        return self.vocabulary * self.width

    def count_attention_flops(self, contexts: int) -> int:
        """Return attention's operations for tokens with context lengths that sum to `contexts`."""
        return 4 * self.layers * self.heads * self.head_dim * contexts

    def count_hidden_flops(self, tokens: int, contexts: int) -> int:
        """Return the operations from tokens to hidden states."""
        return 2 * (self.body + self.adapters) * tokens + self.count_attention_flops(contexts)

    def count_head_flops(self, tokens: int) -> int:
        """Return the operations from hidden states to logits."""
        return 2 * self.head * tokens

    def count_forward_flops(self, context: int) -> int:
        """Return F(c), the operations of one token from its id to the logits of the next."""
        return self.count_hidden_flops(1, context) + self.count_head_flops(1)

    def count_kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of this many tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize * tokens


@dataclass(frozen=True, slots=True)
class TrainableDims:
    """The sizes of the trainable part of a model.

    The gradient passes back through the last `layers`; `body` and `adapters` count the matrix
    entries in them that receive one; `head` tells whether the last linear map is trained;
    `parameters` counts all trainable parameters.
    """

    parameters: int
    layers: int
    body: int
    adapters: int
    head: bool

    def count_update_flops(
        self, shape: ModelDims, read: "ReadTokens", supervised: int, *, recompute: bool = False
    ) -> int:
        """Return the operations of a forward and backward pass.

        The body processes the tokens in `read`, the head `supervised` tokens. If everything is
        trained the result is 3 F, with `recompute` 4 F. If lower layers are frozen, the backward
        pass ends above them, and a frozen weight costs 2 operations less per token. The input
        gradient of the lowest layer with adapters is counted although it is not needed.
        """
        forward = shape.count_hidden_flops(read.tokens, read.contexts)
        trained_forward = forward * self.layers // shape.layers
        # The gradient of the inputs costs as much as a forward pass, and attention costs it twice:
        # both factors of its products need a gradient.
        attention = shape.count_attention_flops(read.contexts) * self.layers // shape.layers
        inputs = trained_forward + attention
        weights = 2 * (self.body + self.adapters) * read.tokens
        again = trained_forward if recompute else 0
        return forward + again + inputs + weights + self.count_head_flops(shape, supervised)

    def count_head_flops(self, shape: ModelDims, supervised: int) -> int:
        """Return the head's operations: forward, its inputs' gradient, its weights' gradient."""
        return shape.count_head_flops(supervised) * (1 + bool(self.layers) + self.head)


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a forward pass: all tokens, prompt tokens, and the sum of the context lengths."""

    tokens: int = 0
    prompt_tokens: int = 0
    contexts: int = 0


def count_read_tokens(
    texts: Sequence[tuple[tuple[int, ...], int]], *, decoded: bool = False
) -> ReadTokens:
    """Count the tokens of one call with these texts: prompts, and the number of tokens after each.

    Shared prefixes count once (see `practicum.costs.segments.find_shared_prefixes`); if the texts
    are `decoded`, every prompt counts once. The last token of each text is left out, because it
    predicts nothing. A call that does not fit in one pass reads its shared prefix again in each
    pass: that is not counted, so that the count does not depend on the memory of the machine.
    """
    uses = Counter(prompt for prompt, _ in texts)
    # A prompt is read before its completion is decoded: nothing follows it in that pass.
    passes = (
        [(prompt, 0) for prompt in uses]
        if decoded
        else [(prompt, max(count - 1, 0)) for prompt, count in texts]
    )
    prefixes = find_shared_prefixes(passes)
    root = prefixes.root
    # A span (first, last) has the positions from `first` to `last - 1`.
    spans = [(0, root)]
    for prompt, count in uses.items():
        repeats = 1 if decoded or prompt in prefixes.prompts else count
        spans += [(root, len(prompt))] * repeats
    prompt_tokens = sum(last - first for first, last in spans)
    spans += [(len(prompt), len(prompt) + max(count - 1, 0)) for prompt, count in texts]
    tokens = sum(last - first for first, last in spans)
    # Position p has a context of p + 1: a sum of these is a difference of triangular numbers.
    contexts = sum(last * (last + 1) - first * (first + 1) for first, last in spans) // 2
    return ReadTokens(tokens, prompt_tokens, contexts)


def count_continued_tokens(texts: Sequence[tuple[int, int, int]]) -> ReadTokens:
    """Count the tokens of continued texts; each has numbers of kept tokens, prompt tokens, and
    tokens after the prompt.

    The kept tokens are not read again, but the remaining tokens attend to them.
    """
    spans = [(past, prompt + max(count - 1, 0)) for past, prompt, count in texts]
    tokens = sum(last - first for first, last in spans)
    contexts = sum(last * (last + 1) - first * (first + 1) for first, last in spans) // 2
    return ReadTokens(tokens, sum(prompt - past for past, prompt, _ in texts), contexts)
