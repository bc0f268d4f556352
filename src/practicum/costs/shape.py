"""A model in the quantities that cost, and the floating-point operations that follow from them.

A multiplication and its addition are two operations, as in Kaplan et al. (2001.08361, section 2.1): a token at context length
c takes F(c) = 2 (N_b + N_h) + 4 L H h c operations forward, with N_b the matrices of the layers, N_h the head, L layers of H
heads of width h. Norms, activations, softmax and the optimizer are left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.costs.segments import SHORTEST_SHARED_PREFIX, common_beginning


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes of a language model.

    `parameters` are all of them; `body` the entries of the matrices that multiply every token once (of a mixture of experts
    those of the experts that a token goes to); `adapters` the entries of low-rank adapters beside them. `vocabulary` counts
    the real tokens: rows of padding are never multiplied.
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
        """The entries of the last linear map, N_h = vocabulary x width."""
        return self.vocabulary * self.width

    def attention(self, contexts: int) -> int:
        """Operations of queries with keys and of weights with values, for tokens whose context lengths sum to `contexts`."""
        return 4 * self.layers * self.heads * self.head_dim * contexts

    def hidden(self, tokens: int, contexts: int) -> int:
        """Operations from tokens to hidden states."""
        return 2 * (self.body + self.adapters) * tokens + self.attention(contexts)

    def logits(self, tokens: int) -> int:
        """Operations from hidden states to logits."""
        return 2 * self.head * tokens

    def forward(self, context: int) -> int:
        """F(c): the operations of one token, from its id to the logits of the next, at a context length."""
        return self.hidden(1, context) + self.logits(1)

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of the keys and values of so many tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize * tokens


@dataclass(frozen=True, slots=True)
class TrainableDims:
    """Which part of a model learns.

    The gradient passes back through the last `layers`; `body` and `adapters` are the matrix entries in them that receive one;
    `head` is whether the last linear map moves. `parameters` are all that move.
    """

    parameters: int
    layers: int
    body: int
    adapters: int
    head: bool

    def update(
        self, shape: ModelDims, read: "ReadTokens", learned: int, *, recompute: bool = False
    ) -> int:
        """Operations of the body's forward and backward pass over what was read, and of the head over `learned` tokens.

        With everything learning that is 3 F, with `recompute` 4 F; where lower layers are frozen, the backward pass ends above
        them, and a weight that does not move costs 2 operations less a token. The input gradient of the lowest layer with
        adapters is counted though it is not needed.
        """
        forward = shape.hidden(read.tokens, read.contexts)
        passed = forward * self.layers // shape.layers
        through = passed + shape.attention(read.contexts) * self.layers // shape.layers
        weights = 2 * (self.body + self.adapters) * read.tokens
        again = passed if recompute else 0
        return forward + again + through + weights + self.logits(shape, learned)

    def logits(self, shape: ModelDims, learned: int) -> int:
        """Operations of the head: forward, into the hidden states, and into its own weights where they move."""
        return shape.logits(learned) * (1 + bool(self.layers) + self.head)


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """What goes through a body: how many tokens, of them in prompts, and the sum of their context lengths."""

    tokens: int = 0
    prompt_tokens: int = 0
    contexts: int = 0

    def __add__(self, other: "ReadTokens") -> "ReadTokens":
        return ReadTokens(
            self.tokens + other.tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.contexts + other.contexts,
        )


def count_read_tokens(
    texts: Sequence[tuple[tuple[int, ...], int]], shortest: int = SHORTEST_SHARED_PREFIX
) -> ReadTokens:
    """What one call reads of some texts, given as a prompt and the number of tokens after it.

    What all prompts begin with is read once (16 tokens or more), and so is an equal prompt of which more than `shortest` tokens
    are left; of each answer all but the last token, which predicts nothing. Where a call does not fit in one pass, a common
    beginning is read again in each pass: that is not counted, so that the count does not depend on how much is held at once.
    """
    uses = Counter(prompt for prompt, _ in texts)
    root = common_beginning(list(uses))
    read = _span(0, root)
    for prompt, count in uses.items():
        rest = _span(root, len(prompt))
        for _ in range(1 if rest.tokens >= shortest else count):
            read += rest
    prompt_tokens = read.tokens
    for prompt, count in texts:
        read += _span(len(prompt), len(prompt) + max(count - 1, 0))
    return ReadTokens(read.tokens, prompt_tokens, read.contexts)


def _span(first: int, last: int) -> ReadTokens:
    """The tokens at positions `first` to `last` - 1; the token at position p looks at p + 1 tokens."""
    return ReadTokens(last - first, 0, (last * (last + 1) - first * (first + 1)) // 2)
