"""The engine on machines that we do not own: a worker made of a cost model, and a clock that it moves (paper §6, at its scale).

    Engine(worker=SimulatedWorker(PRESETS["opt-13b"], HARDWARE["a100"], ...), clock=the same VirtualClock)

Scheduler, cache, policies and the step loop are the real ones; only the tensors are missing. `execute` adds up what the batch
would take and moves the clock by that: a roofline for the matrix products of all tokens together, one for the attention of each
span, a price per layer and per step for what is neither, and copies that overlap the computation layer by layer:

    copies in    |0|1|2|3|...              layer l computes when it has arrived and layer l-1 is done
    layers         |  0  |  1  |  2  |     so a step takes max(first copy + all layers, all copies + last layer)

Invariant: figures of hardware are data sheets' or measured, efficiencies are chosen once; no experiment has its own."""
from typing import NamedTuple

from eviction import RecomputeCost
from scheduler import Batch, Result, Span


class VirtualClock:
    """Seconds since the simulation began. Time passes when a worker computes or somebody sleeps, and only then."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds


class Hardware(NamedTuple):
    """Of one GPU, per second: peaks, or rates that were measured."""
    flops: float            # of a dense matrix product
    memory: float           # bytes read
    host_link: float        # bytes to or from the host, each way
    peer_link: float        # bytes to another GPU, each way
    element_size: int = 2   # bytes of a number in all of this: bfloat16


# NVIDIA's data sheets: A100 80GB PCIe, H100 SXM5, H200 SXM5. The paper's machine (Azure NC A100 v4) has its PCIe cards bridged in
# pairs only, so that a reduction over four goes through PCIe.
HARDWARE = {
    "a100": Hardware(312e12, 1935e9, 32e9, 32e9),
    "h100": Hardware(989e12, 3350e9, 64e9, 450e9),
    "h200": Hardware(989e12, 4800e9, 64e9, 450e9),
}


class Operators(NamedTuple):
    """What an implementation makes of the hardware: shares of the peaks, and seconds that no peak explains."""
    matmul: float
    attention: float        # of flops
    memory: float
    link: float
    per_layer: float        # launches and gaps between kernels
    per_step: float         # scheduling, inputs, sampling
    per_span: float = 0.0   # what a batch costs the host for each of its spans


# Matrix products of large batches, long copies and FlashAttention-2 (190 of 312 TFLOP/s) on an A100 reach about these shares; gathered
# attention in Triton is somewhat below. Ten launches of 5 us per layer, and 3 ms per step, are an eager engine's in Python. "fused"
# stands for an engine of compiled operators, such as TensorRT-LLM: nothing in it was measured on one.
OPERATORS = {
    "eager": Operators(matmul=0.65, attention=0.45, memory=0.80, link=0.80, per_layer=50e-6, per_step=3e-3),
    "fused": Operators(matmul=0.75, attention=0.55, memory=0.90, link=0.80, per_layer=15e-6, per_step=1e-3),
}


class SimulatedWorker:
    """Takes the time that `gpus` GPUs together would take (tensor parallelism), and answers with token 0."""
    stop_ids = frozenset()

    def __init__(self, shape, hardware: Hardware, operators: Operators, clock: VirtualClock, num_slots: int, num_places: int,
                 max_context: int, chunk_size: int = 32, gpus: int = 1, pipeline: bool = True):
        """shape: a model.ModelConfig, of which only sizes are looked at; max_context is the experiment's, as in the paper."""
        self.shape, self.operators, self.clock, self.gpus, self.pipeline = shape, operators, clock, gpus, pipeline
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.vocab_size, self.max_context, self.element_size = shape.vocab_size, max_context, hardware.element_size
        self.token_bytes = kv_token_bytes(shape, hardware.element_size)
        self.matmul = hardware.flops * operators.matmul * gpus
        self.attend = hardware.flops * operators.attention * gpus
        self.memory = hardware.memory * operators.memory * gpus
        self.link = hardware.host_link * operators.link * gpus         # each GPU copies its share of the heads
        self.peer = hardware.peer_link * operators.link
        self.out_ends = 0.0                                            # when the link out of the GPUs is free
        self.flights = []                                              # (end, tickets), by end

    def execute(self, batch: Batch) -> Result:
        """Moves the clock to the end of the batch; with nothing to compute to that of the oldest copy, as Worker does."""
        begin, arriving = self.clock(), self.copy_seconds(batch.swap_in)
        end = begin + self.overlapped(arriving, self.step_seconds(batch.spans)) if batch.spans else begin
        if batch.swap_in:
            self.flights.append((begin + arriving, batch.swap_in))
        if batch.swap_out:                                             # behind what comes in, and behind earlier ones
            self.out_ends = max(self.out_ends, begin + arriving) + self.copy_seconds(batch.swap_out)
            self.flights.append((self.out_ends, batch.swap_out))
        self.flights.sort(key=lambda flight: flight[0])
        if not batch.spans and self.flights:
            end = max(begin, self.flights[0][0])
        self.clock.sleep(end - begin)
        landed = [ticket for at, tickets in self.flights if at <= end for ticket in tickets]
        self.flights = [flight for flight in self.flights if flight[0] > end]
        return Result([0] * sum(span.samples for span in batch.spans), landed)

    def overlapped(self, copy: float, compute: float) -> float:
        """Seconds of a step whose swap-ins take `copy` and whose layers take `compute` in all."""
        layers = self.shape.num_layers
        return max(copy / layers + compute, copy + compute / layers) if self.pipeline else copy + compute

    def step_seconds(self, spans: list[Span]) -> float:
        tokens, samples = sum(span.end - span.start for span in spans), sum(span.samples for span in spans)
        attention = sum(self.attention_seconds(end - start, end) for _, start, end in spans)
        return self.linear_seconds(tokens, samples) + attention + len(spans) * self.operators.per_span

    def linear_seconds(self, tokens: int, samples: int) -> float:
        """Everything but attention: the matrix products, or reading their weights, whichever is longer."""
        shape, head = self.shape, self.shape.vocab_size * self.shape.width
        compute = 2 * (shape.matmul_parameters * tokens + head * samples) / self.matmul
        read = (shape.matmul_parameters + head) * self.element_size / self.memory
        reduced = 4 * (self.gpus - 1) / self.gpus * tokens * shape.width * self.element_size / self.peer      # twice a layer, there and back
        fixed = self.operators.per_step + shape.num_layers * self.operators.per_layer
        return max(compute, read) + shape.num_layers * reduced + fixed

    def attention_seconds(self, q_len: int, kv_len: int) -> float:
        """Of one span in all layers: its products, or reading its KV, whichever is longer."""
        shape = self.shape
        seen = q_len * kv_len - q_len * (q_len - 1) / 2                # pairs of a query and a position
        return max(4 * shape.num_layers * shape.num_heads * shape.head_dim * seen / self.attend, kv_len * self.token_bytes / self.memory)

    def copy_seconds(self, tickets) -> float:
        return sum(ticket.filled for ticket in tickets) * self.token_bytes / self.link

    def profile(self) -> RecomputeCost:
        """Of a chunk that is computed alone, as Worker measures it."""
        lengths = [self.chunk_size << n for n in range((self.max_context // self.chunk_size).bit_length())]
        return RecomputeCost({length: self.attention_seconds(self.chunk_size, length) for length in lengths},
                             self.linear_seconds(self.chunk_size, 0))


def kv_token_bytes(shape, element_size: int) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element_size
