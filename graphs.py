"""CUDA graphs: the launches of a small batch, captured once and replayed as one.

In a small batch a GPU would wait for the host, which launches hundreds of short kernels. A graph
launches them all at once, but always the same ones, on the same memory. So a batch is padded to the
smallest size that was captured, its inputs are copied into that memory, and the graph is replayed:

    3 decodes  ->  padded to 4  ->  copied into the inputs of graph (4, decodes)  ->  replayed

Padding has a row and a slot of its own (see Worker). Invariant: a graph computes for the spans of
the batch what their launches would, and touches no other slot than theirs and that of padding.
"""
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from attention_kernel import SpanTensors

# The most tokens of a batch with a prompt that has a graph. On an H100 with models of 13B, a graph
# of 128 tokens takes 2 to 23% less time than launching each kernel, but one of 320 tokens 7% more:
# with so many tokens the host is faster than the GPU.
MOST_REPLAYED = 256


class GraphSize(NamedTuple):
    """The batches that a captured graph has room for."""
    tokens: int
    decodes: bool       # every span is one token; otherwise there may be prompts, too

    @property
    def longest(self) -> int:
        """The most tokens that a span can have."""
        return 1 if self.decodes else self.tokens


def graph_sizes(max_running: int) -> list[GraphSize]:
    """The sizes to capture, the largest first: the others can share its memory. 1, 2, 4, 8, 16, 32,
    48, ... decodes (multiples of 16), up to the first size that holds max_running; and for batches
    with prompts 64, 128, ... tokens, up to MOST_REPLAYED."""
    decodes = [1, 2, 4, 8, *range(16, max_running + 16, 16)]
    sizes = [GraphSize(tokens, True) for smaller, tokens in zip([0, *decodes], decodes)
             if smaller < max_running]
    sizes += [GraphSize(tokens, False) for tokens in range(64, MOST_REPLAYED + 1, 64)]
    return sorted(sizes, reverse=True)


class Captured(NamedTuple):
    """A graph, and the inputs that its kernels read at every replay.

    Each graph keeps the memory of its result, so it ends at the hidden states. The logits of all
    decodes up to 256 would be 2,191 rows, 1.1 GB with a vocabulary of 128,256."""
    flat: Tensor                        # the memory of the inputs
    spans: SpanTensors
    replay: Callable[[], Tensor]        # returns the hidden states [tokens, width]


class Graphs:
    """The graphs of a worker, by size. At first there are none."""

    def __init__(self):
        self.captured: dict[GraphSize, Captured] = {}

    def size_for(self, tokens: int, spans: int) -> GraphSize | None:
        """The smallest graph that has room for that many tokens in that many spans, if any."""
        decodes = tokens == spans
        return min((size for size in self.captured
                    if size.tokens >= tokens and size.decodes == decodes), default=None)

    def replay(self, size: GraphSize, flat: Tensor, spans: SpanTensors) -> Tensor:
        """The hidden states [size.tokens, width] for these inputs of a batch of that size. The host
        does not wait: the device copies the inputs when earlier replays have ended."""
        graph = self.captured[size]
        graph.flat.copy_(flat)
        graph.spans.host = spans.host       # for the reference, which tests "capture" on a CPU
        return graph.replay()
