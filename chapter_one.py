"""Pensieve in one file: a chat server's cache in two tiers. Read this first.

    python chapter_one.py       plays three conversations, prints each step, checks each reply

For each token a language model computes two vectors in every layer, K and V, and all later tokens
read them. A stateless server forgets this *KV* after a reply, and computes the whole history again
for the next. Pensieve (Yu, Lin, Li, EuroSys '25) keeps it. A *slot* of the GPU tier holds the KV of
one token, for attention to read. A *place* of the CPU tier holds a copy of one *chunk*: 4 tokens of
a conversation. A chunk in neither tier is computed again. In step 15 b returns with a prompt:

    b's context   | CPU [0:4) | absent [4:8) | GPU [8:16) | reply's last token, prompt [16:21) |
    the step        copied in   computed       used there   computed
    its line      step 15  b[4:8] b[16:21] | in b[0:4] | out c[8:16]

b[4:8] is a *span*: positions that a step computes. A hole is a span, a prompt is a span, and each
further token of a reply is a span of length 1. One batch mixes them all, because attention needs
only the slots of a span's context, wherever they lie. The step also copies two chunks of c *out*,
ahead of need. They remain readable until somebody takes their slots; then nobody has to wait.

If a tier is full, the chunk of the lowest *retention value* V = Cost(l) / T leaves it. Cost(l) is
the time to compute it again, which grows with the context length l at its end; T is how long its
conversation has been idle. In step 11 that is 10 s for a and 4 s for b; Cost(l) = l / 4 + 1.1 s:

    b[0:4]      V = (4 / 4 + 1.1) / 4 = 0.53        leaves first: leading chunks are cheap
    a[20:21]    V = (24 / 4 + 1.1) / 10 = 0.71      leaves next (l = 24, where it ends when full)

We search where the system keeps books, and leave out copies that take time (kv_pool.py), threads
and batches launched ahead (engine.py), suspension (scheduler.py), shared chunks (sharing.py).
"""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from checkpoint import find_checkpoint, load_model
from rotary_store import rotate

SLOTS, PLACES, CHUNK = 32, 3, 4     # GPU tier in tokens, CPU tier in chunks, tokens of a chunk
BUDGET = 16                         # the most tokens that a step computes
THRESHOLD = SLOTS // 4              # with fewer slots available we copy chunks out
RESERVE = SLOTS // 10               # slots that an admission leaves to those that run already


@dataclass(eq=False)
class Chunk:
    """Up to CHUNK tokens; the first `filled` have KV (absent: 0). The system proper: kv_cache.py"""
    conversation: "Conversation"
    start: int                                      # the position of its first token
    filled: int = 0
    slots: list[int] = field(default_factory=list)  # in the GPU tier, one for each token
    copy: torch.Tensor | None = None                # in the CPU tier
    evictable_without_copy: bool = False            # we gave it up, as c[0:9] in step 6

    @property
    def next_move(self) -> str | None:
        """What eviction does next with an idle chunk: copy it out, reclaim its slots, drop it."""
        if not self.slots:
            return "drop" if self.copy is not None else None
        return "swap_out" if self.copy is None and not self.evictable_without_copy else "reclaim"


@dataclass(eq=False)
class Conversation:
    name: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    new: int = 0                # of this turn's context, the tokens that never had KV
    end: int = 0                # the turn ends when there are so many tokens
    last_active: int = 0        # when the last turn ended, in seconds
    sources: str = ""           # where this turn has found its KV

    def slot_table(self) -> list[int]:              # while a turn runs: position -> slot
        return [slot for chunk in self.chunks for slot in chunk.slots]

    def missing(self) -> list[tuple[int, int]]:
        """The runs [start, end) of positions without KV: for b in step 15, [(4, 8), (16, 21)]."""
        cached = [chunk for chunk in self.chunks if chunk.filled]
        starts = [0] + [chunk.start + chunk.filled for chunk in cached]
        ends = [chunk.start for chunk in cached] + [len(self.tokens)]
        return [(start, end) for start, end in zip(starts, ends) if start < end]


@dataclass
class Batch:
    """What a step computes and copies; in step 4 c decodes, and a's prompt is computed."""
    budget: int = BUDGET                            # tokens that still fit
    spans: list[tuple[Conversation, int, int]] = field(default_factory=list)
    swap_in: list[Chunk] = field(default_factory=list)
    swap_out: list[Chunk] = field(default_factory=list)

    def take(self, conversation: Conversation):
        """Add its missing runs. The last may stop early: step 11 has c[0:16], step 12 the rest."""
        for start, end in conversation.missing():
            end = min(end, start + self.budget)
            if start < end:
                self.spans.append((conversation, start, end))
                self.budget -= end - start

    def __str__(self) -> str:
        text = words((one.name, start, end) for one, start, end in self.spans)
        for way, chunks in (("in", self.swap_in), ("out", self.swap_out)):
            runs = [(one.conversation.name, one.start, one.start + one.filled) for one in chunks]
            text += f" | {way} {words(sorted(runs))}" if runs else ""
        return text


def words(runs) -> str:
    merged = []             # neighbours become one: [0, 4) and [4, 8) are printed as [0:8]
    for name, start, end in runs:
        if merged and merged[-1][0] == name and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((name, start, end))
    return " ".join(f"{name}[{start}:{end}]" for name, start, end in merged)


class Pensieve:
    def __init__(self, model):
        self.model, config = model, model.config
        self.gpu = torch.zeros(config.num_layers, 2, config.num_kv_heads, SLOTS, config.head_dim)
        self.chunks: list[Chunk] = []               # of all conversations
        self.queue: list[Conversation] = []         # their turns wait
        self.running: list[Conversation] = []       # their turns are being served
        self.steps, self.now = 0, 0                 # now: in seconds

    # ---- Who runs. The system proper: engine.py (submit, step), scheduler.py
    def submit(self, conversation: Conversation, prompt: list[int], reply_length: int):
        self.now += 1
        conversation.new = len(prompt) + bool(conversation.tokens)  # a reply's last has no KV
        conversation.tokens += prompt
        conversation.end = len(conversation.tokens) + reply_length
        self.queue.append(conversation)

    def step(self):
        self.now += 1
        batch = self.schedule()
        print(f"step {self.steps}  {batch}")
        next_tokens = self.execute(batch.spans) if batch.spans else []
        self.steps, self.now = self.steps + 1, self.now + 1
        self.account(batch.spans, next_tokens)

    def schedule(self) -> Batch:
        """Running turns go on. First come, first served: the head of the queue joins if it finds
        slots for all tokens. In step 10 c finds 15 for 17, so a[16:20] is copied out; c waits."""
        batch = Batch()
        for conversation in self.running:
            total, room = len(conversation.tokens), len(conversation.slot_table())
            if total > room and self.available() >= CHUNK * len(self.running):
                total = -(-total // CHUNK) * CHUNK  # slots are plenty: those of a whole chunk
            self.give_slots(conversation, total)
            batch.take(conversation)
        while self.queue and batch.budget > 0 and self.shortfall(self.queue[0]) <= 0:
            self.admit(self.queue.pop(0), batch)
        self.swap_out(batch, THRESHOLD - self.available())
        if self.queue:
            self.swap_out(batch, self.shortfall(self.queue[0]), besides=self.queue[0])
        return batch if batch.spans or batch.swap_out else self.schedule()

    def shortfall(self, conversation: Conversation) -> int:
        """Slots that must become available before it joins. Its own chunks are no help."""
        needed = len(conversation.tokens) - len(conversation.slot_table())
        return needed + (RESERVE if self.running else 0) - self.available(besides=conversation)

    def admit(self, conversation: Conversation, batch: Batch):
        self.running.append(conversation)
        returning = [one for one in conversation.chunks if one.filled and not one.slots]
        cpu = sum(chunk.filled for chunk in returning)
        gpu = sum(chunk.filled for chunk in conversation.chunks) - cpu
        new, total = conversation.new, len(conversation.tokens)
        recomputed = total - gpu - cpu - new
        conversation.sources = f"gpu {gpu} · cpu {cpu} · recomputed {recomputed} · new {new}"
        self.give_slots(conversation, total)
        for chunk in returning:
            self.gpu[:, :, :, chunk.slots[:chunk.filled]] = chunk.copy
        batch.swap_in += returning
        batch.take(conversation)

    def account(self, spans: list[tuple[Conversation, int, int]], next_tokens: list[int]):
        for (conversation, start, end), token in zip(spans, next_tokens):
            for chunk in conversation.chunks[start // CHUNK:(end - 1) // CHUNK + 1]:
                chunk.filled, chunk.copy = min(end - chunk.start, CHUNK), None     # it has grown
            if end == len(conversation.tokens):                 # else a later span goes on here
                conversation.tokens.append(token)
            if len(conversation.tokens) == conversation.end:    # the turn ends, and the KV stays
                self.running.remove(conversation)
                conversation.last_active = self.now
                for chunk in conversation.chunks:
                    del chunk.slots[chunk.filled:]
                    chunk.evictable_without_copy = False

    # ---- Where chunks are. The system proper: kv_cache.py, kv_pool.py
    def free_slots(self) -> set[int]:
        return set(range(SLOTS)) - {slot for chunk in self.chunks for slot in chunk.slots}

    def available(self, besides: Conversation | None = None) -> int:
        """How many slots can be taken at once: free ones, and those of reclaimable chunks."""
        reclaimable = sum(len(chunk.slots) for chunk in self.idle_chunks("reclaim", besides))
        return len(self.free_slots()) + reclaimable

    def give_slots(self, conversation: Conversation, total: int):
        """A slot for each position below `total`: a free one, or one of the cheapest idle chunk."""
        for start in range(len(conversation.chunks) * CHUNK, total, CHUNK):
            conversation.chunks.append(Chunk(conversation, start))
            self.chunks.append(conversation.chunks[-1])
        for chunk in conversation.chunks:
            while len(chunk.slots) < min(CHUNK, total - chunk.start):
                if not self.free_slots():
                    loser = self.idle_chunks("reclaim")[0]
                    loser.slots, loser.filled = [], loser.filled if loser.copy is not None else 0
                chunk.slots.append(min(self.free_slots()))

    def swap_out(self, batch: Batch, wanted: int, besides: Conversation | None = None):
        """Copy idle chunks out, the cheapest first, until `wanted` more slots are available."""
        for chunk in self.idle_chunks("swap_out", besides):
            if wanted > 0:
                wanted -= len(chunk.slots)
                if self.find_place(chunk, batch, besides):
                    chunk.copy = self.gpu[:, :, :, chunk.slots]
                    batch.swap_out.append(chunk)
                else:
                    chunk.evictable_without_copy = True     # which may make room: schedule again

    def find_place(self, chunk: Chunk, batch: Batch, besides: Conversation | None) -> bool:
        """A free place, or that of a running conversation's chunk, or that of a cheaper chunk."""
        copied = [one for one in self.chunks if one.copy is not None]
        losers = [one for conversation in self.running for one in conversation.chunks
                  if one.copy is not None and one not in batch.swap_in]
        losers += [one for one in self.idle_chunks("drop", besides)
                   if self.value(one) < self.value(chunk)]
        if len(copied) == PLACES and losers:
            losers[0].copy = None
            losers[0].filled = losers[0].filled if losers[0].slots else 0
        return len(copied) < PLACES or bool(losers)

    # ---- What a chunk is worth. The system proper: eviction.py
    def value(self, chunk: Chunk) -> tuple[float, str, int]:
        """V = Cost(l) / T. A conversation whose turn waits in the queue is hardly idle."""
        length, conversation = chunk.start + CHUNK, chunk.conversation
        idle = 0.001 if conversation in self.queue else self.now - conversation.last_active
        return (length / 4 + 1.1) / idle, conversation.name, chunk.start    # names decide ties

    def idle_chunks(self, move: str, besides: Conversation | None = None) -> list[Chunk]:
        """All chunks with this next move, the cheapest first; none that runs, or of `besides`."""
        return sorted((chunk for chunk in self.chunks if chunk.next_move == move
                       and chunk.conversation not in [*self.running, besides]), key=self.value)

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

        def attend(layer, q, k, v, rotation):                   # q [T, H, D], k and v [T, H_kv, D]
            k_cache, v_cache = self.gpu[layer]                  # [H_kv, SLOTS, D] each
            k_cache[:, slots] = rotate(k, *rotation).transpose(0, 1)
            v_cache[:, slots] = v.transpose(0, 1)               # all of it, before a span reads it
            q, attended = rotate(q, *rotation).transpose(0, 1), []              # [H, T, D]
            for queries, (conversation, start, end) in zip(q.split(lengths, dim=1), spans):
                context = conversation.slot_table()[:end]       # query i sees 0 ... start + i of it
                visible = torch.ones(end - start, end, dtype=torch.bool).tril(start)
                attended.append(F.scaled_dot_product_attention(
                    queries, k_cache[:, context], v_cache[:, context], visible, enable_gqa=True))
            return torch.cat(attended, dim=1).transpose(0, 1)   # [T, H, D]
        hidden = self.model(torch.tensor(tokens), torch.tensor(positions), attend)  # [T, width]
        last = torch.tensor(lengths).cumsum(0) - 1              # [S]
        return self.model.logits(hidden[last]).argmax(-1).tolist()


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
    pensieve = Pensieve(load_model(find_checkpoint("tiny_chat"), "cpu", torch.float32))
    conversations = {name: Conversation(name) for name in "abc"}
    for turns in ({"a": 6, "b": 7}, {"c": 7, "a": 10, "b": 4}, {"c": 7}, {"b": 4}):
        for name, length in turns.items():
            pensieve.submit(conversations[name], list(range(65, 65 + length)), reply_length=3)
        while pensieve.queue or pensieve.running:
            pensieve.step()
        for name in turns:
            print(f"    {name}: {conversations[name].sources}")
            tokens = conversations[name].tokens
            assert tokens[-3:] == recompute(pensieve.model, tokens)[-4:-1]
    print("Every reply is that of a full recomputation.")


if __name__ == "__main__":
    main()
