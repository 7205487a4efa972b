"""Hints: a turn is likely soon, so the conversation's KV returns before the user has sent a word.

A user types for ten seconds. A hint at the first keystroke brings back what the conversation has
lost. A *warm-up* is a request without a client: it copies in and recomputes like any other, samples
nothing, and takes only what nobody wants. In chunks of 4, with a budget of 16 for each step:

    the conversation    | absent [0:4) | CPU [4:12) | GPU [12:16) |
    nothing runs        step 7  a[0:4] | in a[4:12]
    b decodes           step 7  b[31:32] a[0:2] | in a[4:12]        an eighth of the budget
                        step 8  b[32:33] a[2:4]

A warm-up is admitted and released within one step. Behind it others may take the slots again:

    copied in           the chunk has its copy still: reclaimed as usual
    recomputed          the chunk is *marked* (Chunk.evictable_without_copy): taken without a copy
    which ones first    the policy's choice, to which the conversation is needed just now: for
                        SECONDS it leaves last

Invariant: behind a warm-up's step as many slots are available as before, or will be when its copies
in have ended.
"""
from collections import Counter

from kv_cache import Chunk, Conversation, KVCache
from sampling import Sampling
from scheduler import Batch, Request, Scheduler

SECONDS = 30.0      # for which a hint holds
SHARE = 8           # beside running requests warm-ups compute at most an eighth of the budget (but
                    # copy in all that they need at once)


class WarmUp(Request):
    """Brings back what its conversation has lost. It has a finish_reason from the beginning: it has
    no client, so the scheduler has nothing to end, to cancel or to account for."""

    def __init__(self, conversation: Conversation, until: float):
        """until: the hint holds until then, in seconds."""
        super().__init__(conversation, [], sampling=Sampling(), prefilling=True,
                         finish_reason="warmed")
        self.until = until
        # Everything was there when we last looked: it is not brought back again.
        self.served = False
        # Before its step: the chunks that were on the GPU alone and not marked, and how many tokens
        # each had. See Hints.release.
        self.kept: dict[Chunk, int] = {}

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

    def holding(self, now: float) -> dict[Conversation, WarmUp]:
        """The hints that hold: not those that are too old, whose turn has come, or whose
        conversation is forgotten."""
        held = self.cache.conversations
        return {conversation: warm_up for conversation, warm_up in self.warm_ups.items()
                if now < warm_up.until and held.get(conversation.name) is conversation
                and not self._has_turn(conversation)}

    def give(self, conversation: Conversation, now: float) -> dict[str, int]:
        """A turn of the conversation is likely soon. Returns how many of its tokens are on the GPU
        (gpu), and how many are to be copied in (cpu) and recomputed. All are 0, and nothing
        happens, if a turn of it runs or waits, if a hint for it holds already, or if no turn would
        fit."""
        self.warm_ups = self.holding(now)
        # (A prompt and a reply have a token each.)
        too_long = len(conversation.tokens) + 2 > self.scheduler.limit
        if too_long or conversation in self.warm_ups or self._has_turn(conversation):
            return nothing_to_do()
        warm_up = self.warm_ups[conversation] = WarmUp(conversation, now + SECONDS)
        self.cache.expect(conversation, warm_up.until)
        self.stats["hints"] += 1
        gpu, cpu = conversation.cached()
        return dict(gpu=gpu, cpu=cpu, recomputed=max(warm_up.end - gpu - cpu, 0))

    def fill(self, batch: Batch, now: float):
        """Add warm-ups to a batch, if nobody waits in the queue and nobody is starved."""
        self.warm_ups = self.holding(now)
        unserved = [warm_up for warm_up in self.warm_ups.values() if not warm_up.served]
        scheduler, cache = self.scheduler, self.cache
        phases_apart = scheduler.separate_phases and batch.spans
        # (A request as long as it may become needs no slot: its last token is on its way.)
        starved = any(each.conversation.room < each.total and each.total != each.longest
                      for each in scheduler.running)
        if not unserved or scheduler.queue or starved or phases_apart:
            return
        warm = Batch(batch.step, batch.budget)
        if scheduler.running:
            warm.budget = min(batch.budget, scheduler.max_batch_tokens // self.share)
        # By chunk, since running conversations may share some:
        pinned = {chunk: len(chunk.slots) for one in cache.running.values() for chunk in one.chunks}
        for warm_up in unserved:
            if warm.budget > 0 and cache.free_rows:
                self._serve(warm_up, warm, pinned, now)
        # In front of the decodes that take guesses along, which come last: see guesses.py.
        first = len(batch.spans) - len(batch.guesses)
        batch.spans[first:first] = warm.spans
        batch.swap_in += warm.swap_in
        batch.swap_out += warm.swap_out
        batch.table_updates += cache.take_table_updates()
        self.stats["warmed_tokens_cpu"] += sum(ticket.filled for ticket in warm.swap_in)
        self.stats["warmed_tokens_recomputed"] += sum(end - start for _, start, end in warm.spans)

    def _serve(self, warm_up: WarmUp, batch: Batch, pinned: dict[Chunk, int], now: float):
        """Let one warm-up take part in a batch of warm-ups, if slots beyond the reserve suffice.
        Idle conversations make room for it as they would for its turn.

        pinned: the chunks of all who run, and how many slots each has."""
        scheduler, cache, conversation = self.scheduler, self.cache, warm_up.conversation
        if not cache.extend(conversation, ()):      # (SharingCache: another turn is computing some)
            return
        warm_up.served = conversation.cached()[0] >= warm_up.end
        # Of 100 slots 60 are pinned, 20 of these in chunks of this conversation, too. It needs 50,
        # so 50 + 40 of others are taken: that leaves a reserve of 10, but none of 11.
        needed, reserve = conversation.known, scheduler.reserve_slots
        shared = sum(pinned.get(chunk, 0) for chunk in conversation.chunks)
        others = sum(pinned.values()) - shared
        if warm_up.served or needed + reserve + others > cache.num_slots:
            return                                  # nothing to do, or no eviction would help
        # Slots of other idle conversations that are to be available behind it: else the next turn
        # would take those that the hint has filled.
        left = max(reserve, scheduler.threshold_slots)
        batch.swap_out += cache.plan_swap_out_for(conversation, needed, left, now)
        if cache.shortfall(conversation, needed, reserve) > 0:
            return                                  # maybe in a later step
        warm_up.kept = {chunk: chunk.filled for chunk in conversation.chunks
                        if chunk.state == "GPU" and not chunk.evictable_without_copy}
        # (Not SharingCache.admit: a warm-up is no turn that others follow, or that copies a tail.)
        batch.swap_in += KVCache.admit(cache, conversation, needed, now)
        batch.take(warm_up)
        self.in_batch.append(warm_up)

    def release(self):
        """The batch is launched, or has failed: those whose warm-ups it has are idle again.

            a chunk, before         behind it           marked
            absent                  on the GPU          yes: it has taken 4 available slots
            on the GPU, 2 of 4      4 of 4              yes: it has taken 2
            on the GPU, 4 of 4      the same            no: it has taken none
            marked                  the same            yes, as before: admit has ended that
            on the CPU              in both tiers       no: its copy is enough"""
        for warm_up in self.in_batch:
            conversation = warm_up.conversation
            # It begins to be idle when the hint is over, not now: see KVCache.expect.
            self.cache.release(conversation, conversation.last_active)
            for chunk in conversation.chunks:
                if not chunk.pinned:                # another user may run
                    grown = warm_up.kept.get(chunk) != chunk.filled
                    chunk.evictable_without_copy = grown and chunk.place is None
        self.in_batch.clear()

    def give_up(self):
        """The worker has failed: no hint shall make it fail again."""
        self.release()
        self.warm_ups.clear()

    def _has_turn(self, conversation: Conversation) -> bool:
        return conversation.order in self.scheduler.unfinished


def nothing_to_do() -> dict[str, int]:
    return dict(gpu=0, cpu=0, recomputed=0)
