"""The engine on machines that we do not own: a worker that computes only times, and moves a clock.

    clock = VirtualClock()
    worker = SimulatedWorker(PRESETS["opt-13b"], HARDWARE["a100"], OPERATORS["eager"], clock, ...)
    engine = Engine(worker=worker, clock=clock)

Scheduler, cache, policies and the step loop are the real ones; only the tensors are missing.
`execute` adds up the seconds that the batch would take, and moves the clock by them (paper
§6, at the paper's scale). It counts the matrix products of all tokens together, the
attention of each span, a fixed price per layer and per step, and the copies, which overlap
the computation layer by layer:

    copies in    |0|1|2|3|...
    layers         |  0  |  1  |  2  |

Layer l starts when its KV has arrived and layer l - 1 is done. So a step takes the longer of the
first copy + all layers, and all copies + the last layer.

Each product takes its arithmetic or its reading from memory, whichever
is longer (the roofline model).

Invariant: for the paper's machines the rates come from data sheets, and we chose the
operators' shares of them once. For a measured machine `bench.py profile` gives both. No
experiment has rates or shares of its own.
"""
from typing import NamedTuple

from eviction import RecomputeCost
from scheduler import Batch, Result, Span


class VirtualClock:
    """Seconds since the simulation began. Time passes only when a worker computes or somebody
    sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds


class Hardware(NamedTuple):
    """What one GPU can do per second: its peaks, or rates that were measured."""
    flops: float            # of a dense matrix product
    memory: float           # bytes read
    host_link: float        # bytes to or from the host, each way
    peer_link: float        # bytes to another GPU, each way
    element_size: int = 2   # bytes of a number in all of this: bfloat16


# From NVIDIA's data sheets: A100 80GB PCIe, H100 SXM5, H200 SXM5. In the paper's machine (Azure NC
# A100 v4) only pairs of PCIe cards are bridged, so a reduction over four cards goes through PCIe.
HARDWARE = {
    "a100": Hardware(flops=312e12, memory=1935e9, host_link=32e9, peer_link=32e9),
    "h100": Hardware(flops=989e12, memory=3350e9, host_link=64e9, peer_link=450e9),
    "h200": Hardware(flops=989e12, memory=4800e9, host_link=64e9, peer_link=450e9),
}


class Operators(NamedTuple):
    """How much of the hardware an implementation reaches: shares of the
    peaks, and seconds of its own."""
    matmul: float           # share of flops
    attention: float        # share of flops
    memory: float           # share
    link: float             # share
    per_layer: float        # seconds of launches, and of gaps between kernels
    per_step: float         # seconds of scheduling, inputs and sampling
    per_span: float = 0.0   # seconds of the host for each span of a batch
    per_query_head: bool = False    # attention reads K and V for each query head, not for a group


# On an A100, matrix products of large batches, long copies and FlashAttention-2 (190 of 312
# TFLOP/s) reach about these shares; gathered attention in Triton is somewhat slower. An eager
# engine in Python makes ten launches of 5 us per layer, and takes 3 ms per step. "fused" stands for
# an engine of compiled operators, such as TensorRT-LLM; nothing in it was measured on one.
OPERATORS = {
    "eager": Operators(matmul=0.65, attention=0.45, memory=0.80, link=0.80, per_layer=50e-6,
                       per_step=3e-3),
    "fused": Operators(matmul=0.75, attention=0.55, memory=0.90, link=0.80, per_layer=15e-6,
                       per_step=1e-3),
}


# A copy keeps this share of its rate while another one runs the other way:
# the paper lost 18 to 20% (§5).
BOTH_WAYS = 0.81


class SimulatedWorker:
    """A worker that answers every sample with token 0, and says how long that would have taken.

    `gpus` GPUs share each matrix product and the attention heads, as tensor parallelism does.
    """
    stop_ids = frozenset()

    def __init__(self, shape, hardware: Hardware, operators: Operators, clock: VirtualClock,
                 num_slots: int, num_places: int, max_context: int, chunk_size: int = 32,
                 gpus: int = 1, pipeline: bool = True):
        """shape: a model.ModelConfig, of which we use only the sizes. num_slots: tokens of the GPU
        cache. num_places: chunks of the CPU tier. max_context: the longest context of the
        experiment, in tokens. pipeline: False computes a step only after all of its copies in."""
        self.shape, self.operators, self.clock = shape, operators, clock
        self.gpus, self.pipeline = gpus, pipeline
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.vocab_size, self.max_context = shape.vocab_size, max_context
        self.element_size = hardware.element_size
        self.token_bytes = kv_token_bytes(shape, hardware.element_size)
        readers = shape.num_heads // shape.num_kv_heads if operators.per_query_head else 1
        self.read_bytes = self.token_bytes * readers    # what attention reads of a KV-token
        # Rates per second that all GPUs reach together; but each GPU has
        # its own link to the other GPUs.
        self.matmul_flops = hardware.flops * operators.matmul * gpus
        self.attention_flops = hardware.flops * operators.attention * gpus
        self.memory = hardware.memory * operators.memory * gpus
        self.link = hardware.host_link * operators.link * gpus
        self.peer = hardware.peer_link * operators.link
        # of a query and a key
        self.attention_flop = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        self.out_ends = 0.0         # when the link out of the GPUs is free
        self.flights = []           # (end, tickets) of copies under way, in the order of ends

    def execute(self, batch: Batch) -> Result:
        """Move the clock to the end of the batch. A batch without spans waits for the oldest copy.

        Copies out start after this batch's copies in and after all earlier copies out. They may
        last longer than the step; their tickets land in the first step that ends later. Earlier
        copies out that still run and this batch's copies in slow each other down: of 10 ms in and 5
        ms out, the 5 ms that both run take 6.17 ms, so the copies in take 11.17 ms."""
        begin = self.clock()
        samples = sum([span.samples for span in batch.spans])
        arriving = self.copy_seconds(batch.swap_in)
        lost = (1 / BOTH_WAYS - 1) * min(arriving, max(self.out_ends - begin, 0.0))
        arriving += lost
        self.out_ends += lost
        # all of them go out
        self.flights = [(end + lost, tickets) for end, tickets in self.flights]
        if batch.swap_in:
            self.flights.append((begin + arriving, batch.swap_in))
        if batch.swap_out:
            self.out_ends = max(self.out_ends, begin + arriving) + self.copy_seconds(batch.swap_out)
            self.flights.append((self.out_ends, batch.swap_out))
        self.flights.sort(key=lambda flight: flight[0])

        end = begin
        if batch.spans:
            end = begin + self.overlapped(arriving, self.step_seconds(batch.spans, samples))
        elif self.flights:
            end = max(begin, self.flights[0][0])
        self.clock.sleep(end - begin)

        landed = [ticket for at, tickets in self.flights if at <= end for ticket in tickets]
        self.flights = [flight for flight in self.flights if flight[0] > end]
        return Result([0] * samples, landed)

    def overlapped(self, copy: float, compute: float) -> float:
        """Seconds of a step; copy: of all its copies in; compute: of all its layers.

        All layers are alike. A layer starts when its copies have ended and the layer before it is
        done; without the pipeline the first layer starts when all copies have ended.

        2 layers, copy 10 ms, compute 4 ms: the last layer starts after 10
        ms and takes 2 ms, so 12 ms."""
        if not self.pipeline:
            return copy + compute
        layers = self.shape.num_layers
        return max(copy / layers + compute, copy + compute / layers)

    def step_seconds(self, spans: list[Span], samples: int) -> float:
        tokens = sum([end - start for _, start, end in spans])
        attention = sum([self.attention_seconds(end - start, end) for _, start, end in spans])
        linear = self.linear_seconds(tokens, samples)
        return linear + attention + len(spans) * self.operators.per_span

    def linear_seconds(self, tokens: int, samples: int) -> float:
        """Seconds of everything but attention. samples: tokens that go
        through the output layer, too.

        The matrix products of all layers, or reading their weights;
        reductions between GPUs; launches."""
        shape = self.shape
        head = shape.vocab_size * shape.width
        compute = 2 * (shape.matmul_parameters * tokens + head * samples) / self.matmul_flops
        read = (shape.matmul_parameters + head) * self.element_size / self.memory
        # Two reductions per layer; in each, (gpus - 1) / gpus of the
        # activations travel there and back.
        sent = tokens * shape.width * self.element_size
        reduced = 4 * (self.gpus - 1) / self.gpus * sent / self.peer
        launches = self.operators.per_step + shape.num_layers * self.operators.per_layer
        return max(compute, read) + shape.num_layers * reduced + launches

    def attention_seconds(self, q_len: int, kv_len: int) -> float:
        """Seconds of one span's attention in all layers: its products, or reading its KV.

        The queries of the span [2, 5) have q_len 3 and kv_len 5; they
        see 3 + 4 + 5 = 12 positions."""
        seen = q_len * kv_len - q_len * (q_len - 1) / 2
        compute = self.attention_flop * seen / self.attention_flops
        return max(compute, kv_len * self.read_bytes / self.memory)

    def copy_seconds(self, tickets) -> float:
        return sum(ticket.filled for ticket in tickets) * self.token_bytes / self.link

    def profile(self) -> RecomputeCost:
        """What one more chunk adds to a batch that runs anyway, as Worker.profile measures it. The
        batch has a million tokens, so that arithmetic takes longer than reading the weights."""
        count = max(1, self.max_context // self.chunk_size).bit_length()
        lengths = [self.chunk_size << n for n in range(count)]          # 32, 64, 128, ... tokens
        attention = {length: self.attention_seconds(self.chunk_size, length) for length in lengths}
        batch = 1_000_000
        rest = self.linear_seconds(batch + self.chunk_size, 0) - self.linear_seconds(batch, 0)
        return RecomputeCost(attention, rest)


def kv_token_bytes(shape, element_size: int) -> int:
    """Bytes of one KV-token: K and V of all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element_size
