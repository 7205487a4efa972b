"""Hints: a turn is likely soon, so the conversation's KV returns before the user has sent a word.

A user types for ten seconds. A hint at the first keystroke brings back what the conversation has
lost. A *warm-up* is a request without a client: it copies in and recomputes like any other, samples
nothing, and takes only what nobody wants. In chunks of 4, with a budget of 16 for each step:

    the conversation    | absent [0:4) | CPU [4:12) | GPU [12:16) |
    nothing runs        step 7  a[0:4] | in a[4:12]
    b decodes           step 7  b[31:32] a[0:2] | in a[4:12]        an eighth of the budget
                        step 8  b[32:33] a[2:4]

For SECONDS the policy counts the conversation as needed just now. Nothing else keeps its KV: a
warm-up is admitted and released within one step, and chunks that it has recomputed are *marked*
(Chunk.evictable_without_copy). So a hint can be forgotten at any moment, and whoever is starved in
the next step takes the slots back.

Invariant: behind a warm-up's step as many slots are available as before, or will be when its copies
in have ended.
"""
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from kv_cache import Chunk, Conversation, KVCache
from sampling import Sampling
from scheduler import Batch, Request, Scheduler

SECONDS = 30.0      # for which a hint holds
SHARE = 8           # beside running requests warm-ups compute at most an eighth of the budget


class WarmUp(Request):
    """Brings back what its conversation has lost. It has no client, so it has ended when it begins."""

    def __init__(self, conversation: Conversation, until: float):
        """until: the hint holds until then, in seconds."""
        super().__init__(conversation, [], sampling=Sampling(), prefilling=True,
                         finish_reason="warmed")
        self.until = until
        self.served = False             # everything was there once: it is not brought back again
        self.kept: set[Chunk] = set()   # in its step: chunks that stay as they are

    @property
    def end(self) -> int:
        """Positions [0, end) had KV before. Without the last token: that one is computed to
        sample."""
        return min(self.conversation.known, self.total - 1)

    def missing(self) -> list[tuple[int, int]]:
        runs = [(start, min(end, self.end)) for start, end in super().missing()]
        return [(start, end) for start, end in runs if start < end]


class Hints:
    """The hints that hold, and their share of each batch."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.cache, self.share = scheduler, scheduler.cache, SHARE
        self.warm_ups: dict[Conversation, WarmUp] = {}      # the oldest hint first
        self.in_batch: list[WarmUp] = []                    # of the batch that is to be launched
        self.stats = Counter(hints=0, warmed_tokens_cpu=0, warmed_tokens_recomputed=0)

    def __len__(self) -> int:
        return len(self.warm_ups)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.warm_ups)

    def give(self, conversation: Conversation, now: float) -> dict[str, int]:
        """A turn of the conversation is likely soon. Returns how many of its tokens are on the GPU
        (gpu), and how many are to be copied in (cpu) and recomputed. All are 0, and nothing
        happens, if a turn of it runs or waits, if a hint for it holds already, or if no turn would
        fit."""
        self._end_hints(now)
        scheduler = self.scheduler
        too_long = len(conversation.tokens) + 2 > scheduler.limit       # a prompt and a reply
        if too_long or conversation in self.warm_ups or self._has_turn(conversation):
            return nothing_to_do()
        warm_up = self.warm_ups[conversation] = WarmUp(conversation, now + SECONDS)
        self.cache.expect(conversation, warm_up.until)
        self.stats["hints"] += 1
        gpu, cpu = conversation.sources()
        return dict(gpu=gpu, cpu=cpu, recomputed=max(warm_up.end - gpu - cpu, 0))

    def fill(self, batch: Batch, now: float):
        """Add warm-ups to a batch, if nobody waits in the queue and nobody is starved."""
        self._end_hints(now)
        scheduler, cache = self.scheduler, self.cache
        alone = scheduler.separate_phases and batch.spans
        starved = any(request.conversation.room < request.total for request in scheduler.running)
        if scheduler.queue or starved or alone:
            return
        if scheduler.running:
            batch.budget = min(batch.budget, scheduler.max_batch_tokens // self.share)
        for warm_up in self.warm_ups.values():
            if batch.budget > 0 and cache.free_rows and not warm_up.served:
                self._serve(warm_up, batch, now)
        batch.table_updates += cache.take_table_updates()

    def _serve(self, warm_up: WarmUp, batch: Batch, now: float):
        """Let one warm-up take part in the batch, if slots beyond the reserve suffice. Idle
        conversations make room for it as they would for its turn."""
        scheduler, cache, conversation = self.scheduler, self.cache, warm_up.conversation
        if not cache.extend(conversation, ()):      # another turn is computing some of it: sharing
            return
        warm_up.served = conversation.sources()[0] >= warm_up.end
        needed, reserve = conversation.known, scheduler.reserve_slots
        running = sum(one.room for one in cache.running.values())
        if warm_up.served or needed + reserve + running > cache.num_slots:
            return                                  # nothing to do, or no eviction would help
        spare = max(reserve, scheduler.threshold_slots)
        batch.swap_out += cache.plan_swap_out_for(conversation, needed, spare, now)
        if cache.shortfall(conversation, needed, reserve) > 0:
            return
        warm_up.kept = {chunk for chunk in conversation.chunks
                        if chunk.slots and not chunk.evictable_without_copy}
        # (Not SharingCache.admit: a warm-up is no turn that others follow, or that copies a tail.)
        swap_in = KVCache.admit(cache, conversation, needed, now)
        first_new = len(batch.spans)
        batch.take(warm_up)
        batch.swap_in += swap_in
        self.in_batch.append(warm_up)
        self.stats["warmed_tokens_cpu"] += sum(ticket.filled for ticket in swap_in)
        self.stats["warmed_tokens_recomputed"] += sum(
            end - start for _, start, end in islice(batch.spans, first_new, None))

    def release(self):
        """The batch is launched, or has failed: the conversations of its warm-ups are idle again."""
        for warm_up in self.in_batch:
            conversation = warm_up.conversation
            self.cache.release(conversation, conversation.last_active)
            for chunk in conversation.chunks:
                # (A chunk that was copied in has its copy still.)
                chunk.evictable_without_copy = chunk not in warm_up.kept and chunk.place is None
        self.in_batch.clear()

    def give_up(self):
        """The worker has failed: no hint shall make it fail again."""
        self.release()
        self.warm_ups.clear()

    def _has_turn(self, conversation: Conversation) -> bool:
        return conversation.order in self.scheduler.unfinished

    def _end_hints(self, now: float):
        """Drop hints that are too old, whose turn has come, or whose conversation is forgotten."""
        for conversation, warm_up in list(self.warm_ups.items()):
            held = self.cache.conversations.get(conversation.name) is conversation
            if now >= warm_up.until or self._has_turn(conversation) or not held:
                del self.warm_ups[conversation]


def nothing_to_do() -> dict[str, int]:
    return dict(gpu=0, cpu=0, recomputed=0)
