"""Pensieve in one file: two tiers for the KV of conversations. Read this first.

    python chapter_one.py       plays three conversations, prints each step, checks each reply

A language model computes two vectors for each token in each layer, K and V, and all later tokens
read them. A stateless server forgets this *KV* after each reply, and computes the whole history
again at the next turn. Pensieve (Yu, Lin, Li, EuroSys '25) keeps it in two tiers. A *slot* of the
GPU tier holds the KV of one token, and attention reads it there. A place of the CPU tier holds a
copy of one *chunk*: 4 consecutive tokens of a conversation. If both tiers lose a chunk, we compute
its KV again, for the raw tokens are never lost. In step 15 conversation b has all of this:

    b's context   | CPU [0:4) | absent [4:8) | GPU [8:16) | last reply token, new prompt [16:21) |
    the step        copied in   b[4:8]         is there     b[16:21]
    we print      step 15  b[4:8] b[16:21] | in b[0:4] | out c[8:16]

`b[4:8]` is a *span*: positions to compute in this step. A prompt is a span, a hole is a span, and a
decode is a span of length 1: the last token goes in, the next one comes out. One batch mixes them
all, because attention asks only for the slots of a span's context, in any order. A step does this:

    1. Each running conversation gets slots for the tokens that it has grown by.
    2. First come, first served: the head of the queue joins when its whole context finds slots.
    3. If fewer than 8 slots are available, the step copies idle chunks *out* ahead of need. Their
       slots remain readable until somebody takes them.
    4. One forward pass computes all spans, and samples a token behind each finished context.

The chunk of the lowest retention value V = Cost(l) / T leaves first. Cost(l) is the time to compute
it again, which grows with the context length l at its end; T is for how long its conversation has
been idle. In step 11 a has been idle for 10 s and b for 4 s, and Cost(l) = l / 4 + 1.1 seconds:

    b[0:4]   V = (1 + 1.1) / 4 = 0.53   goes first: a short context is cheap to attend to
    a[20:21] V = (6 + 1.1) / 10 = 0.71  goes next: its chunk ends at l = 24 when it is full
    b[8:12]  V = (3 + 1.1) / 4 = 1.03

Here we search where the system keeps books. Not here at all: copies that take time (kv_pool.py), a
batch launched ahead, threads (engine.py), suspension (scheduler.py), sharing (sharing.py).
"""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import find_checkpoint, load_model
from rotary_store import rotate

CHUNK = 4                   # tokens
SLOTS, PLACES = 32, 3       # the GPU tier, in tokens; the CPU tier, in chunks
BUDGET = 16                 # the most tokens that one step computes
THRESHOLD = SLOTS // 4      # so many slots should be available: else we copy chunks out
RESERVE = SLOTS // 10       # an admission leaves so many slots to those that run already
MIN_IDLE = 0.001            # seconds; no conversation counts as idle for less


# The life of a chunk. The system proper: kv_cache.py

@dataclass(eq=False)
class Chunk:
    """Up to 4 tokens; the first `filled` of them have KV. Absent: neither slots nor a copy."""
    conversation: "Conversation"
    start: int                                      # the position of its first token
    filled: int = 0
    slots: list[int] = field(default_factory=list)  # in the GPU tier, one for each token
    copy: Tensor | None = None                      # in the CPU tier
    evictable_without_copy: bool = False            # its copy would not be worth a place

    @property
    def next_move(self) -> str | None:
        """What eviction does next with this chunk, if its conversation is idle."""
        if not self.slots:
            return "drop" if self.copy is not None else None
        if self.copy is None and not self.evictable_without_copy:
            return "swap_out"
        return "reclaim"                            # take its slots


@dataclass(eq=False)
class Conversation:
    name: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    known: int = 0                  # so many of its tokens have had KV before this turn
    to_generate: int = 0            # so many tokens of this turn's reply are to come
    last_active: int = 0            # when its last turn ended, in seconds
    sources: str = ""               # where this turn has found its KV

    def slot_table(self) -> list[int]:
        """The slot of each position, while a turn runs."""
        return [slot for chunk in self.chunks for slot in chunk.slots]

    def missing(self) -> list[tuple[int, int]]:
        """The runs [start, end) of positions without KV. For b in step 15: [(4, 8), (16, 21)]."""
        runs, start = [], 0
        for chunk in self.chunks:
            if chunk.filled:                        # a run ends where its KV begins
                if start < chunk.start:
                    runs.append((start, chunk.start))
                start = chunk.start + chunk.filled
        return runs + [(start, len(self.tokens))]


# Who runs. The system proper: scheduler.py

@dataclass
class Batch:
    """What one step computes and copies."""
    budget: int = BUDGET                            # tokens that still fit
    spans: list[tuple[Conversation, int, int]] = field(default_factory=list)
    swap_in: list[Chunk] = field(default_factory=list)
    swap_out: list[Chunk] = field(default_factory=list)

    def take(self, conversation: Conversation):
        """Add its missing runs. The last one may stop early, as in step 11: c[0:16], not c[0:17]."""
        for start, end in conversation.missing():
            end = min(end, start + self.budget)
            if start < end:
                self.spans.append((conversation, start, end))
                self.budget -= end - start


class Pensieve:
    def __init__(self, model):
        self.model, config = model, model.config
        self.gpu = torch.zeros(config.num_layers, 2, config.num_kv_heads, SLOTS, config.head_dim)
        self.chunks: list[Chunk] = []               # of all conversations
        self.queue: list[Conversation] = []         # their turns wait
        self.running: list[Conversation] = []       # their turns are being served
        self.now = 0                                # in seconds

    def submit(self, conversation: Conversation, prompt: list[int], reply_length: int):
        """A turn arrives."""
        self.now += 1
        conversation.known = max(len(conversation.tokens) - 1, 0)   # the last one was never fed
        conversation.tokens += prompt
        conversation.to_generate = reply_length
        self.queue.append(conversation)

    def step(self) -> Batch:
        """Schedule, execute, account. The system proper: engine.py"""
        self.now += 1
        batch = self.schedule()
        next_tokens = self.execute(batch.spans) if batch.spans else []
        self.now += 1
        self.account(batch.spans, next_tokens)
        return batch

    def schedule(self) -> Batch:
        batch = Batch()
        for conversation in self.running:
            self.grow(conversation)
            batch.take(conversation)
        while self.queue and batch.budget > 0 and self.shortfall(self.queue[0]) <= 0:
            self.admit(self.queue.pop(0), batch)
        self.swap_out(batch, THRESHOLD - self.available())
        if self.queue:
            self.swap_out(batch, self.shortfall(self.queue[0]), besides=self.queue[0])
        # A batch may be empty, because chunks have become evictable without a copy: then try again.
        return batch if batch.spans or batch.swap_out else self.schedule()

    def shortfall(self, conversation: Conversation) -> int:
        """How many more slots must become available before it may join."""
        needed = len(conversation.tokens) - len(conversation.slot_table())
        reserve = RESERVE if self.running else 0
        return needed + reserve - self.available(besides=conversation)

    def admit(self, conversation: Conversation, batch: Batch):
        """All slots of its context at once; what is on the CPU comes back."""
        self.running.append(conversation)
        returning = [chunk for chunk in conversation.chunks if chunk.copy is not None and not chunk.slots]
        cpu = sum(chunk.filled for chunk in returning)
        gpu = sum(chunk.filled for chunk in conversation.chunks) - cpu
        new = len(conversation.tokens) - conversation.known
        recomputed = conversation.known - gpu - cpu
        conversation.sources = f"gpu {gpu} · cpu {cpu} · recomputed {recomputed} · new {new}"
        self.give_slots(conversation, len(conversation.tokens))
        for chunk in returning:
            self.gpu[:, :, :, chunk.slots[:chunk.filled]] = chunk.copy
        batch.swap_in += returning
        batch.take(conversation)

    def account(self, spans: list[tuple[Conversation, int, int]], next_tokens: list[int]):
        for (conversation, start, end), token in zip(spans, next_tokens):
            for chunk in conversation.chunks[start // CHUNK:(end - 1) // CHUNK + 1]:
                chunk.filled = min(end - chunk.start, CHUNK)
                chunk.copy = None                   # it would be too short now
            if end == len(conversation.tokens):
                conversation.tokens.append(token)
                conversation.to_generate -= 1
                if conversation.to_generate == 0:   # the turn ends, and the KV stays
                    self.running.remove(conversation)
                    conversation.last_active = self.now
                    for chunk in conversation.chunks:
                        del chunk.slots[chunk.filled:]
                        chunk.evictable_without_copy = False

    # Slots and places. The system proper: kv_cache.py, kv_pool.py

    def free_slots(self) -> set[int]:
        return set(range(SLOTS)) - {slot for chunk in self.chunks for slot in chunk.slots}

    def available(self, besides: Conversation | None = None) -> int:
        """How many slots can be taken at once: free ones, and those of reclaimable chunks."""
        reclaimable = sum(len(chunk.slots) for chunk in self.idle_chunks("reclaim", besides))
        return len(self.free_slots()) + reclaimable

    def grow(self, conversation: Conversation):
        """Slots for its new tokens; while slots are plenty, for the rest of the chunk as well."""
        total, room = len(conversation.tokens), len(conversation.slot_table())
        if total > room and self.available() >= CHUNK * len(self.running):
            total = -(-total // CHUNK) * CHUNK      # rounded up
        self.give_slots(conversation, total)

    def give_slots(self, conversation: Conversation, total: int):
        for start in range(len(conversation.chunks) * CHUNK, total, CHUNK):
            conversation.chunks.append(Chunk(conversation, start))
            self.chunks.append(conversation.chunks[-1])
        for chunk in conversation.chunks:
            while len(chunk.slots) < min(CHUNK, total - chunk.start):
                chunk.slots.append(self.take_slot())

    def take_slot(self) -> int:
        if not self.free_slots():
            loser = self.idle_chunks("reclaim")[0]
            loser.slots = []
            if loser.copy is None:
                loser.filled = 0                    # absent
        return min(self.free_slots())

    def swap_out(self, batch: Batch, wanted: int, besides: Conversation | None = None):
        """Copy idle chunks out, the cheapest first, until `wanted` more slots are available."""
        for chunk in self.idle_chunks("swap_out", besides):
            if wanted > 0:
                wanted -= len(chunk.slots)
                if self.find_place(chunk, batch, besides):
                    chunk.copy = self.gpu[:, :, :, chunk.slots]
                    batch.swap_out.append(chunk)
                else:
                    chunk.evictable_without_copy = True

    def find_place(self, chunk: Chunk, batch: Batch, besides: Conversation | None) -> bool:
        copied = [other for other in self.chunks if other.copy is not None]
        losers = [other for other in copied
                  if other.conversation in self.running and other not in batch.swap_in]
        losers += [other for other in self.idle_chunks("drop", besides)
                   if self.value(other) < self.value(chunk)]
        if len(copied) == PLACES and losers:
            losers[0].copy = None
            if not losers[0].slots:
                losers[0].filled = 0                # absent
        return len(copied) < PLACES or bool(losers)

    # What a chunk is worth. The system proper: eviction.py

    def value(self, chunk: Chunk) -> float:
        """V = Cost(l) / T. A conversation whose turn waits in the queue is not idle."""
        length = chunk.start + CHUNK
        waits = chunk.conversation in self.queue
        idle = 0 if waits else self.now - chunk.conversation.last_active
        return (length / 4 + 1.1) / max(idle, MIN_IDLE)

    def idle_chunks(self, move: str, besides: Conversation | None = None) -> list[Chunk]:
        """All chunks with this next move, the cheapest first."""
        pinned = self.running + [besides]
        return sorted((chunk for chunk in self.chunks if chunk.next_move == move
                       and chunk.conversation not in pinned), key=self.value)

    # A batch becomes tensors. The system proper: worker.py, attention_kernel.py

    @torch.inference_mode()
    def execute(self, spans: list[tuple[Conversation, int, int]]) -> list[int]:
        """Compute the KV of all spans. Returns the most likely next token behind each of them."""
        tokens, positions, slots, lengths, contexts, masks = [], [], [], [], [], []
        for conversation, start, end in spans:
            table = conversation.slot_table()
            tokens += conversation.tokens[start:end]
            positions += range(start, end)
            slots += table[start:end]
            lengths.append(end - start)
            contexts.append(table[:end])
            masks.append(torch.ones(end - start, end, dtype=torch.bool).tril(start))

        def attend(layer, q, k, v, rotation):                   # q [T, H, D], k and v [T, H_kv, D]
            k_cache, v_cache = self.gpu[layer]                  # [H_kv, SLOTS, D] each
            k_cache[:, slots] = rotate(k, *rotation).transpose(0, 1)
            v_cache[:, slots] = v.transpose(0, 1)
            queries = rotate(q, *rotation).transpose(0, 1).split(lengths, dim=1)
            attended = [F.scaled_dot_product_attention(
                some, k_cache[:, context], v_cache[:, context], attn_mask=mask, enable_gqa=True)
                for some, context, mask in zip(queries, contexts, masks)]
            return torch.cat(attended, dim=1).transpose(0, 1)   # [T, H, D]

        hidden = self.model(torch.tensor(tokens), torch.tensor(positions), attend)  # [T, width]
        last = torch.tensor(lengths).cumsum(0) - 1              # [S]
        return self.model.logits(hidden[last]).argmax(-1).tolist()


# Three conversations. The same as in engine.py

def words(spans) -> str:
    """Spans as name[start:end], neighbours as one."""
    merged = []
    for name, start, end in spans:
        if merged and merged[-1][0] == name and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((name, start, end))
    return " ".join(f"{name}[{start}:{end}]" for name, start, end in merged)


def line(batch: Batch) -> str:
    line = words((one.name, start, end) for one, start, end in batch.spans)
    for way, chunks in (("in", batch.swap_in), ("out", batch.swap_out)):
        copies = sorted((one.conversation.name, one.start, one.start + one.filled) for one in chunks)
        line += f" | {way} {words(copies)}" if copies else ""
    return line


@torch.inference_mode()
def recompute(model, tokens: list[int]) -> list[int]:
    """The next token behind every position, in one dense pass that knows of no cache."""
    def attend(layer, q, k, v, rotation):
        q, k, v = (x.transpose(0, 1) for x in (rotate(q, *rotation), rotate(k, *rotation), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(0, 1)
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return model.logits(hidden).argmax(-1).tolist()


def main():
    pensieve, step = Pensieve(load_model(find_checkpoint("tiny_chat"), "cpu", torch.float32)), 0
    conversations = {name: Conversation(name) for name in "abc"}
    for turns in ({"a": 6, "b": 7}, {"c": 7, "a": 10, "b": 4}, {"c": 7}, {"b": 4}):
        for name, prompt_length in turns.items():
            prompt = list(range(65, 65 + prompt_length))
            pensieve.submit(conversations[name], prompt, reply_length=3)
        while pensieve.queue or pensieve.running:
            print(f"step {step}  {line(pensieve.step())}")
            step += 1
        for name in turns:
            print(f"    {name}: {conversations[name].sources}")
            tokens = conversations[name].tokens
            assert tokens[-3:] == recompute(pensieve.model, tokens)[-4:-1]
    print("Every reply is that of a full recomputation.")


if __name__ == "__main__":
    main()
