"""Pensieve in one file: a chat server's cache in two tiers. Read this first.

    python chapter_one.py       plays three conversations, prints each step, checks each reply

For each token a language model computes two vectors in every layer, K and V, and all later tokens
read them. A stateless server forgets this *KV* after each reply, and computes the whole history
again at the next turn. Pensieve (Yu, Lin, Li, EuroSys '25) keeps it. A *slot* of the GPU tier
holds the KV of one token; attention reads it there. A *place* of the CPU tier holds a copy of one
*chunk*: 4 consecutive tokens of a conversation. If a chunk is in neither tier, it is computed again
from the raw tokens, which are never lost. In step 15 conversation b returns with a prompt:

    b's context   | CPU [0:4) | absent [4:8) | GPU [8:16) | reply's last token, prompt [16:21) |
    the step        copied in   computed       used there   computed
    its line      step 15  b[4:8] b[16:21] | in b[0:4] | out c[8:16]

b[4:8] is a *span*: positions that a step computes. A hole is a span, a prompt is a span, and each
further token of a reply is a span of length 1. One batch mixes them all, because attention needs
only the slots of a span's context, wherever they are. The step also copies two chunks of c *out*,
ahead of need: they remain readable until somebody takes their slots, and then nobody waits.

If a tier is full, the chunk of the lowest *retention value* leaves it: V = Cost(l) / T. Cost(l)
is the time to compute it again. It grows with l, the context length at the chunk's end, because
attention does. T is how long the conversation has been idle. Take step 11, where a has been idle
for 10 seconds and b for 4, with Cost(l) = l / 4 + 1.1 seconds:

    b[0:4]      V = (1 + 1.1) / 4 = 0.53        leaves first: leading chunks are cheap
    a[20:21]    V = (6 + 1.1) / 10 = 0.71       leaves next (l = 24, where the full chunk ends)

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
THRESHOLD, RESERVE = SLOTS // 4, SLOTS // 10        # see schedule, shortfall


@dataclass(eq=False)
class Chunk:
    """Up to CHUNK tokens; the first `filled` have KV. The system proper: kv_cache.py"""
    conversation: "Conversation"
    start: int                                      # the position of its first token
    filled: int = 0
    slots: list[int] = field(default_factory=list)  # in the GPU tier, one for each token
    copy: torch.Tensor | None = None                # in the CPU tier
    evictable_without_copy: bool = False            # its copy would not be worth a place

    @property
    def next_move(self) -> str | None:
        """What eviction does next with this chunk, if its conversation is idle."""
        if not self.slots:
            return "drop" if self.copy is not None else None
        return "swap_out" if self.copy is None and not self.evictable_without_copy else "reclaim"


@dataclass(eq=False)
class Conversation:
    name: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    new: int = 0                # tokens of this turn's context that have never had KV
    end: int = 0                # this turn ends when there are so many tokens
    last_active: int = 0        # when its last turn ended, in seconds
    sources: str = ""           # where this turn has found its KV

    def slot_table(self) -> list[int]:
        """The slot of each position, while a turn runs."""
        return [slot for chunk in self.chunks for slot in chunk.slots]

    def missing(self) -> list[tuple[int, int]]:
        """The runs [start, end) of positions without KV: for b in step 15, [(4, 8), (16, 21)]."""
        cached = [chunk for chunk in self.chunks if chunk.filled]
        starts = [0] + [chunk.start + chunk.filled for chunk in cached]
        ends = [chunk.start for chunk in cached] + [len(self.tokens)]
        return [(start, end) for start, end in zip(starts, ends) if start < end]


@dataclass
class Batch:
    """What one step computes and copies. The system proper: scheduler.py"""
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
    """(name, start, end) as name[start:end]; neighbours become one."""
    merged = []
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

    def submit(self, conversation: Conversation, prompt: list[int], reply_length: int):
        self.now += 1
        conversation.new = len(prompt) + bool(conversation.tokens)  # a reply's last token has no KV
        conversation.tokens += prompt
        conversation.end = len(conversation.tokens) + reply_length
        self.queue.append(conversation)

    def step(self) -> Batch:
        """Schedule, execute, account. The system proper: engine.py"""
        self.now += 1
        batch = self.schedule()
        next_tokens = self.execute(batch.spans) if batch.spans else []
        self.now += 1
        self.account(batch.spans, next_tokens)
        self.steps += 1
        return batch

    def schedule(self) -> Batch:
        batch = Batch()
        for conversation in self.running:
            total, room = len(conversation.tokens), len(conversation.slot_table())
            if total > room and self.available() >= CHUNK * len(self.running):
                total = -(-total // CHUNK) * CHUNK      # slots are plenty: the whole chunk at once
            self.give_slots(conversation, total)
            batch.take(conversation)
        while self.queue and batch.budget > 0 and self.shortfall(self.queue[0]) <= 0:
            self.admit(self.queue.pop(0), batch)
        self.swap_out(batch, THRESHOLD - self.available())
        if self.queue:
            self.swap_out(batch, self.shortfall(self.queue[0]), besides=self.queue[0])
        # An empty batch: chunks have just become evictable without a copy. The next try fits.
        return batch if batch.spans or batch.swap_out else self.schedule()

    def shortfall(self, conversation: Conversation) -> int:
        """Slots that must become available before it joins. Its own chunks are no help."""
        reserve = RESERVE if self.running else 0
        needed = len(conversation.tokens) - len(conversation.slot_table()) + reserve
        return needed - self.available(besides=conversation)

    def admit(self, conversation: Conversation, batch: Batch):
        self.running.append(conversation)
        returning = [one for one in conversation.chunks if one.filled and not one.slots]
        cpu = sum(chunk.filled for chunk in returning)
        gpu = sum(chunk.filled for chunk in conversation.chunks) - cpu
        new, total = conversation.new, len(conversation.tokens)
        recomputed = total - new - gpu - cpu
        conversation.sources = f"gpu {gpu} · cpu {cpu} · recomputed {recomputed} · new {new}"
        self.give_slots(conversation, total)
        for chunk in returning:
            self.gpu[:, :, :, chunk.slots[:chunk.filled]] = chunk.copy
        batch.swap_in += returning
        batch.take(conversation)

    def account(self, spans: list[tuple[Conversation, int, int]], next_tokens: list[int]):
        for (conversation, start, end), token in zip(spans, next_tokens):
            for chunk in conversation.chunks[start // CHUNK:(end - 1) // CHUNK + 1]:
                chunk.filled, chunk.copy = min(end - chunk.start, CHUNK), None  # no copy is so long
            if end == len(conversation.tokens):
                conversation.tokens.append(token)
            if len(conversation.tokens) == conversation.end:    # the turn ends, and the KV stays
                self.running.remove(conversation)
                conversation.last_active = self.now
                for chunk in conversation.chunks:
                    del chunk.slots[chunk.filled:]
                    chunk.evictable_without_copy = False

    # ---- Slots and places. The system proper: kv_cache.py, kv_pool.py
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
                    loser.slots = []
                    loser.filled = loser.filled if loser.copy is not None else 0
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
                    chunk.evictable_without_copy = True

    def find_place(self, chunk: Chunk, batch: Batch, besides: Conversation | None) -> bool:
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
    def value(self, chunk: Chunk) -> float:
        """V = Cost(l) / T. A conversation whose turn waits in the queue is not idle."""
        length = chunk.start + CHUNK
        waits = chunk.conversation in self.queue
        idle = 0.001 if waits else self.now - chunk.conversation.last_active
        return (length / 4 + 1.1) / idle

    def idle_chunks(self, move: str, besides: Conversation | None = None) -> list[Chunk]:
        """All chunks with this next move, the cheapest first."""
        return sorted((chunk for chunk in self.chunks if chunk.next_move == move
                       and chunk.conversation not in [*self.running, besides]), key=self.value)

    # ---- A batch becomes tensors. The system proper: worker.py, attention_kernel.py
    @torch.inference_mode()
    def execute(self, spans: list[tuple[Conversation, int, int]]) -> list[int]:
        """Compute the KV of all spans. Returns the most likely next token behind each of them."""
        tokens, positions, slots = [], [], []
        for conversation, start, end in spans:
            tokens += conversation.tokens[start:end]
            positions += range(start, end)
            slots += conversation.slot_table()[start:end]
        lengths = [end - start for _, start, end in spans]

        def attend(layer, q, k, v, rotation):                   # q [T, H, D], k and v [T, H_kv, D]
            k_cache, v_cache = self.gpu[layer]                  # [H_kv, SLOTS, D] each
            k_cache[:, slots] = rotate(k, *rotation).transpose(0, 1)
            v_cache[:, slots] = v.transpose(0, 1)
            q, attended = rotate(q, *rotation).transpose(0, 1), []              # [H, T, D]
            for queries, (conversation, start, end) in zip(q.split(lengths, dim=1), spans):
                context = conversation.slot_table()[:end]
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
            print(f"step {pensieve.steps}  {pensieve.step()}")
        for name in turns:
            print(f"    {name}: {conversations[name].sources}")
            tokens = conversations[name].tokens
            assert tokens[-3:] == recompute(pensieve.model, tokens)[-4:-1]
    print("Every reply is that of a full recomputation.")


if __name__ == "__main__":
    main()
