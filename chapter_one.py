"""Pensieve in one file: a chat server's cache in two tiers. Read this first.

    python chapter_one.py       plays three conversations, prints each step, checks each reply

For each token a language model computes two vectors in every layer, K and V, which all later tokens
read. A stateless server forgets this *KV* after a reply, and computes the whole history again next
time. Pensieve (Yu, Lin, Li, EuroSys '25) keeps it. A *slot* of the GPU tier holds the KV of one
token. A *place* of the CPU tier holds a copy of a *chunk*, 4 tokens (really 32). KV in neither tier
is *absent*. Here a and b begin with 11 tokens each, then c; in step 8 a returns with 4 more:

    a's context   | absent [0:4) | CPU [4:8) | GPU [8:13) | reply's last token, prompt [13:18) |
    the step        computes it    copies in   uses it      computes them
    its line      step 8  a[0:4] a[13:18] | in a[4:8] | out b[12:13] c[0:8]

a[0:4] is a *span*: positions that the step computes. A prompt is one, too. Its last position gives
the reply's first token; each further token is a span of length 1: `a[11:12] b[5:11]`, in step 1.
A batch can mix them, because attention needs only the slots of a span's context, wherever they lie.

Why is a[0:4] absent, and what is *out*? If fewer than 8 slots are available, or too few for a turn
that waits, idle chunks of the lowest *retention value* V = Cost(l) / T are copied out. Cost(l) is
the time to compute one again: here, l / 4 + 1 s for a context of length l at its end. T is its idle
time. (A submit takes 1 s, a step 1 s before it chooses and 1 s after.)

    step 4  c[0:11] | out a[8:12] b[0:4]
        a[8:12]     V = (12 / 4 + 1) / 4 = 1.00     copied: a has been idle for 4 s
        b[0:4]      V = ( 4 / 4 + 1) / 2 = 1.00     copied: b for 2 s only, but this is cheap
        a[12:13]    V = (16 / 4 + 1) / 4 = 1.25     not yet (l is where it will end, when full)

A copied chunk stays readable until somebody takes its slots, as c takes those of a[0:8] in step 4
and of b[0:4] in step 6. There b[4:8], worth 3 / 6, is to be copied, but all places are full. Of the
chunks that have a place but no slots, a[0:4] is worth least, 2 / 8: it is dropped.

We search where the system keeps books, and leave out copies that take time (kv_pool.py), threads
and batches launched ahead (engine.py), suspension (scheduler.py), shared chunks (sharing.py).
"""
from dataclasses import dataclass, field

import torch

from checkpoint import find_checkpoint, load_model
from rotary_store import rotate

SLOTS, PLACES, CHUNK = 32, 4, 4     # GPU tier in tokens, CPU tier in chunks, tokens of a chunk
THRESHOLD = SLOTS // 4              # with fewer slots available we copy chunks out
RESERVE = SLOTS // 10               # slots that an admission leaves to those that run already


@dataclass(eq=False)
class Chunk:
    """Up to CHUNK tokens. The first `filled` have KV in a tier."""
    conversation: "Conversation"
    start: int                                      # the position of its first token
    filled: int = 0
    slots: list[int] = field(default_factory=list)  # in the GPU tier, one for each token
    copy: torch.Tensor | None = None                # in the CPU tier
    evictable_without_copy: bool = False            # there was no place for a copy

    @property
    def next_move(self) -> str | None:
        """What eviction does next with an idle chunk: copy it out, reclaim its slots, drop it."""
        if self.slots:
            return "reclaim" if self.copy is not None or self.evictable_without_copy else "swap_out"
        return "drop" if self.copy is not None else None


@dataclass(eq=False)
class Conversation:
    name: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    known_before: int = 0       # when this turn began: tokens that have had KV once
    length_at_end: int = 0      # when there are so many tokens, the turn ends
    last_active: int = 0        # when the last turn ended, in seconds
    sources: str = ""           # where this turn has found its KV

    def slot_table(self) -> list[int]:              # while a turn runs: position -> slot
        return [slot for chunk in self.chunks for slot in chunk.slots]

    def missing(self) -> list[tuple[int, int]]:
        """The runs [start, end) between the cached chunks: [(0, 4), (13, 18)] for a in step 8."""
        cached = [chunk for chunk in self.chunks if chunk.filled]
        starts = [0] + [chunk.start + chunk.filled for chunk in cached]             # 0, 8, 12, 13
        ends = [chunk.start for chunk in cached] + [len(self.tokens)]               # 4, 8, 12, 18
        return [(start, end) for start, end in zip(starts, ends) if start < end]


@dataclass
class Batch:                                        # what a step computes and copies
    budget: int = 16                                # tokens that the step may still compute
    spans: list[tuple[Conversation, int, int]] = field(default_factory=list)
    swap_in: list[Chunk] = field(default_factory=list)
    swap_out: list[Chunk] = field(default_factory=list)

    def take(self, conversation: Conversation):
        """Add its missing runs. If the budget ends, later steps go on: b[0:5], then b[5:11]."""
        for start, end in conversation.missing():
            end = min(end, start + self.budget)
            if start < end:
                self.spans.append((conversation, start, end))
                self.budget -= end - start

    def __str__(self) -> str:
        text = " ".join(f"{one.name}[{start}:{end}]" for one, start, end in self.spans)
        for way, chunks in (("in", self.swap_in), ("out", self.swap_out)):
            spans = [(one.conversation.name, one.start, one.start + one.filled) for one in chunks]
            runs = []           # neighbours become one: [0, 4) and [4, 8) are printed as [0:8]
            for name, start, end in sorted(spans):
                if runs and runs[-1][0] == name and runs[-1][2] == start:
                    start = runs.pop()[1]
                runs.append((name, start, end))
            if runs:
                text += f" | {way} " + " ".join(f"{name}[{a}:{b}]" for name, a, b in runs)
        return text


class Pensieve:
    def __init__(self, model):
        self.model, config = model, model.config
        self.gpu = torch.zeros(config.num_layers, 2, config.num_kv_heads, SLOTS, config.head_dim)
        self.chunks: list[Chunk] = []               # of all conversations
        self.queue: list[Conversation] = []         # their turns wait
        self.running: list[Conversation] = []       # their turns are being served
        self.steps, self.now = 0, 0     # a second passes at each look at this clock

    # ---- Who runs. The system proper: engine.py (submit, step), scheduler.py
    def submit(self, conversation: Conversation, prompt: list[int], reply_length: int):
        self.now += 1
        conversation.known_before = max(0, len(conversation.tokens) - 1)    # the last was not fed
        conversation.tokens += prompt
        conversation.length_at_end = len(conversation.tokens) + reply_length
        self.queue.append(conversation)

    def step(self):
        self.now += 1
        batch = self.schedule()
        print(f"step {self.steps}  {batch}")
        next_tokens = self.execute(batch.spans) if batch.spans else []
        self.steps, self.now = self.steps + 1, self.now + 1
        self.account(batch.spans, next_tokens)

    def schedule(self) -> Batch:
        """Running turns go on. The head of the queue joins if it finds slots for all its tokens."""
        while True:     # an empty batch: `swap_out` has marked chunks, so slots are available now
            batch = Batch()
            for conversation in self.running:
                total, room = len(conversation.tokens), len(conversation.slot_table())
                if total > room and self.available() >= CHUNK * len(self.running):
                    total = -(-total // CHUNK) * CHUNK      # so it asks again only a chunk later
                self.give_slots(conversation, total)
                batch.take(conversation)
            while self.queue and batch.budget > 0 and self.shortfall(self.queue[0]) <= 0:
                self.admit(self.queue.pop(0), batch)
            self.swap_out(batch, THRESHOLD - self.available())
            if self.queue:                                  # it waits, as in step 7
                self.swap_out(batch, self.shortfall(self.queue[0]), besides=self.queue[0])
            if batch.spans or batch.swap_out:
                return batch

    def shortfall(self, conversation: Conversation) -> int:
        """Slots that must become available before it joins; in step 7, 18 - 5 (its own) - 9 = 4."""
        needed = len(conversation.tokens) - len(conversation.slot_table())
        return needed + (RESERVE if self.running else 0) - self.available(besides=conversation)

    def admit(self, conversation: Conversation, batch: Batch):
        self.running.append(conversation)
        total = len(conversation.tokens)
        returning = [one for one in conversation.chunks if one.filled and not one.slots]
        gpu, cpu = len(conversation.slot_table()), sum(chunk.filled for chunk in returning)
        new, recomputed = total - conversation.known_before, conversation.known_before - gpu - cpu
        conversation.sources = f"gpu {gpu} · cpu {cpu} · recomputed {recomputed} · new {new}"
        self.give_slots(conversation, total)
        for chunk in returning:
            self.gpu[:, :, :, chunk.slots[:chunk.filled]] = chunk.copy
        batch.swap_in += returning      # in the system they take time: no place is spare yet
        batch.take(conversation)

    def account(self, spans: list[tuple[Conversation, int, int]], next_tokens: list[int]):
        for (conversation, start, end), token in zip(spans, next_tokens):
            for chunk in conversation.chunks[start // CHUNK:(end - 1) // CHUNK + 1]:
                chunk.filled, chunk.copy = min(end - chunk.start, CHUNK), None     # it has grown
            if end == len(conversation.tokens):     # else the next token is there already
                conversation.tokens.append(token)
            if len(conversation.tokens) == conversation.length_at_end:      # its KV stays
                self.running.remove(conversation)
                conversation.last_active = self.now
                for chunk in conversation.chunks:
                    del chunk.slots[chunk.filled:]      # the last token is never fed
                    chunk.evictable_without_copy = False

    # ---- Where chunks are. The system proper: kv_cache.py, kv_pool.py
    def free_slots(self) -> set[int]:
        return set(range(SLOTS)) - {slot for chunk in self.chunks for slot in chunk.slots}

    def available(self, besides: Conversation | None = None) -> int:
        """How many slots can be taken at once: free ones, and those of reclaimable chunks."""
        reclaimable = sum(len(chunk.slots) for chunk in self.idle("reclaim", besides))
        return len(self.free_slots()) + reclaimable

    def give_slots(self, conversation: Conversation, total: int):
        """A slot for each position below `total`: free, or of the cheapest reclaimable chunk."""
        for start in range(len(conversation.chunks) * CHUNK, total, CHUNK):
            conversation.chunks.append(Chunk(conversation, start))
            self.chunks.append(conversation.chunks[-1])
        for chunk in conversation.chunks:
            while len(chunk.slots) < min(CHUNK, total - chunk.start):
                if not self.free_slots():
                    loser = self.idle("reclaim")[0]
                    loser.slots = []
                    if loser.copy is None:
                        loser.filled = 0
                chunk.slots.append(min(self.free_slots()))

    def swap_out(self, batch: Batch, wanted: int, besides: Conversation | None = None):
        """Copy idle chunks out, the cheapest first, until `wanted` more slots are available."""
        for chunk in self.idle("swap_out", besides):
            if wanted > 0:
                wanted -= len(chunk.slots)
                if self.make_place(chunk, batch, besides):
                    chunk.copy = self.gpu[:, :, :, chunk.slots]
                    batch.swap_out.append(chunk)
                else:
                    chunk.evictable_without_copy = True     # all copies are worth more

    def make_place(self, chunk: Chunk, batch: Batch, besides: Conversation | None) -> bool:
        """Make sure that there is a place for its copy, if need be one that another copy leaves."""
        copied = [one for one in self.chunks if one.copy is not None]
        if len(copied) < PLACES:
            return True
        spare = [one for one in copied      # it runs, so has slots, too (swap_in: see `admit`)
                 if one.conversation in self.running and one not in batch.swap_in]
        cheaper = [one for one in self.idle("drop", besides) if self.rank(one) < self.rank(chunk)]
        if spare:
            spare[0].copy = None
        elif cheaper:
            cheaper[0].copy, cheaper[0].filled = None, 0
        return bool(spare or cheaper)

    # ---- What a chunk is worth. The system proper: eviction.py
    def rank(self, chunk: Chunk) -> tuple[float, float, str]:
        """By V = Cost(l) / T. A conversation whose turn waits in the queue is hardly idle."""
        length, conversation = chunk.start + CHUNK, chunk.conversation
        idle_for = 0.001 if conversation in self.queue else self.now - conversation.last_active
        return (length / 4 + 1) / idle_for, -idle_for, conversation.name    # equal V: longest idle

    def idle(self, move: str, besides: Conversation | None = None) -> list[Chunk]:
        """All chunks with this next move, the cheapest first; none that runs, or of `besides`."""
        return sorted((chunk for chunk in self.chunks if chunk.next_move == move
                       and chunk.conversation not in self.running
                       and chunk.conversation is not besides), key=self.rank)

    # ---- A batch becomes tensors. The system proper: worker.py, attention_kernel.py
    @torch.inference_mode()
    def execute(self, spans: list[tuple[Conversation, int, int]]) -> list[int]:
        """Compute all spans in one pass. Returns the most likely next token behind each of them."""
        tokens, positions, slots = [], [], []
        for conversation, start, end in spans:
            tokens += conversation.tokens[start:end]
            positions += range(start, end)
            slots += conversation.slot_table()[start:end]
        lengths = [end - start for _, start, end in spans]
        # The model calls this in each layer, with the rotation of q and k to their positions.
        def attend(layer, q, k, v, rotation):                   # q [T, H, D], k and v [T, H_kv, D]
            k_cache, v_cache = self.gpu[layer]                  # [H_kv, SLOTS, D] each
            k_cache[:, slots] = rotate(k, *rotation).transpose(0, 1)
            v_cache[:, slots] = v.transpose(0, 1)               # all of it, before a span reads it
            q, attended = rotate(q, *rotation).transpose(0, 1), []              # [H, T, D]
            for queries, (conversation, start, end) in zip(q.split(lengths, dim=1), spans):
                context = conversation.slot_table()[:end]       # query i sees 0 ... start + i of it
                visible = torch.ones(end - start, end, dtype=torch.bool).tril(start)
                attended.append(torch.nn.functional.scaled_dot_product_attention(
                    queries, k_cache[:, context], v_cache[:, context], visible, enable_gqa=True))
            return torch.cat(attended, dim=1).transpose(0, 1)   # [T, H, D]
        hidden = self.model(torch.tensor(tokens), torch.tensor(positions), attend)  # [T, width]
        return self.model.logits(hidden[torch.tensor(lengths).cumsum(0) - 1]).argmax(-1).tolist()


def recompute(model, tokens: list[int]) -> list[int]:
    """The next token behind each one, from a server that remembers nothing."""
    server, conversation = Pensieve(model), Conversation("", tokens)
    server.give_slots(conversation, len(tokens))
    return server.execute([(conversation, start, start + 1) for start in range(len(tokens))])


def main():
    pensieve = Pensieve(load_model(find_checkpoint("tiny_chat"), "cpu", torch.float32))
    conversations = {name: Conversation(name) for name in "abc"}
    for turns in ({"a": 11, "b": 11}, {"c": 11}, {"a": 4}):
        for name, length in turns.items():
            pensieve.submit(conversations[name], list(range(65, 65 + length)), reply_length=3)
        while pensieve.queue or pensieve.running:
            pensieve.step()
        for name in turns:
            print(f"    {name}: {conversations[name].sources}")
            tokens = conversations[name].tokens
            assert tokens[-3:] == recompute(pensieve.model, tokens)[-4:-1]      # of those before
    print("Every reply is that of a full recomputation.")


if __name__ == "__main__":
    main()
