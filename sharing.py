"""Conversations that begin alike share chunks: a layer over kv_cache.py.

Two replies to one message have the whole conversation before it in common. The KV of a position
depends on the tokens up to there and on nothing else, so both conversations can use the same
chunks:

    chunk            0        1        2        3        4
    a              [ ab ]   [ ab ]   [ ab ]   [ a  ]   [ a  ]
    b, a fork        ^        ^        ^      [ b  ]       a.chunks[2] is b.chunks[2], users (a, b)

If a and b also begin chunk 3 with the same tokens, b gets their KV as a copy, from slots of a to
its own, when it is admitted. So only full chunks are shared (those with a token at each position),
and nobody writes other KV into a slot that others use. (PagedAttention shares the chunk that is not
full, too, and copies it when one of its users first writes there.) The caller names the *origin*,
by `fork` or `follow`. Or it names the *tenant* (`own`): then chunks are found by the tokens that a
context begins with (beginnings.py).

The core does the rest, since eviction looks at single chunks. A shared chunk is

    pinned          while any of its users runs
    hardly idle     while a turn of any of them waits
    idle            since the last of them stopped running
    worth           its value times the number of its users
    recomputed      by the first user that runs, for all (if one batch has two, both compute it)
    kept            for the others if one of them gives it up

A thousand chats may begin with one system message. If all were users of its chunks, each change of
a chunk would cost a look at all thousand. So a chunk should have at most MOST_USERS (16). When user
17 comes, the one that has been idle longest leaves the chunk, if any may (`_make_room`). It finds
the chunk again when it returns.

The *designated prefix* (the operator's system prompt) is a conversation that is pinned for good. A
conversation that has no chunk yet shares those full chunks of it with which its context begins.
They count the prefix as their only user.

Invariant: all users of a chunk have the same tokens up to its end.
"""
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

import integrity
from beginnings import Beginnings, has_or_gets_kv
from kv_cache import Chunk, Conversation, KVCache, Ticket

MOST_USERS = 16         # of a chunk; those that run, wait or have no tenant do not leave it


class SharingCache(KVCache):
    """A KVCache whose conversations may share their first chunks."""

    def __init__(self, *sizes_and_policy):
        super().__init__(*sizes_and_policy)
        self.origins: dict[int, Conversation] = {}      # by the order of who follows, see `follow`
        self.beginnings = Beginnings(self.chunk_size)
        self.apart: set[Conversation] = set()           # those that share nothing, see `keep_apart`
        self.designate(())

    def designate(self, tokens: Sequence[int]):
        """Conversations that begin with these tokens share the full chunks of them. The first such
        conversation computes these chunks, and they are never evicted. Call this before the first
        conversation.

        ValueError if they would fill more than half of the slots."""
        assert not self.conversations
        full = len(tokens) // self.chunk_size
        if 2 * full * self.chunk_size > self.num_slots:
            raise ValueError(f"a prefix of {len(tokens)} tokens would fill more than half of "
                             f"{self.num_slots} slots: shorten it")
        tokens = tokens[:full * self.chunk_size]
        self.designated = Conversation("prefix", next(self.orders), tokens, self.chunk_size)
        self.designated.known, self.designated.pinned = len(tokens), True
        self.designated.chunks = [Chunk(self.designated.alone, index) for index in range(full)]

    def fork(self, origin: Conversation, name: str | None, tokens: Iterable[int]) -> Conversation:
        """A new conversation made from `tokens`, which begin like those of `origin`.

        It shares the full chunks of what they have in common, wherever these are and whatever the
        origin is doing. With its first turn it also gets what it has in common behind these: see
        `follow`."""
        assert name not in self.conversations
        conversation = self.open(name, tokens)
        self.follow(conversation, origin)
        known = conversation.tokens[:conversation.known]
        self._use(conversation, self._in_common(conversation, known, origin))
        # The last token of all has had KV, too, if the origin had more tokens behind it.
        common = common_length(conversation.tokens, origin.tokens[:origin.known])
        conversation.known = max(conversation.known, common)
        return conversation

    def follow(self, conversation: Conversation, origin: Conversation):
        """Name the origin of the conversation's next turn: the turn shares its full chunks, and
        copies what is common behind them. (An origin of another tenant is ignored.)

        For n replies to one prompt, n - 1 turns follow the first. The next one in the queue waits
        until the prompt is computed, and so do all others behind it."""
        self.origins[conversation.order] = origin
        self.beginnings.inherit(conversation, origin)

    def own(self, conversation: Conversation, tenant: str):
        """Turns of the conversation use what any conversation of this tenant has computed, as far
        as both begin alike. While another turn computes that, they wait as in `follow`."""
        self.beginnings.own(conversation, tenant)

    def keep_apart(self, conversation: Conversation):
        """From now on its turns share nothing of what others have computed, not even the designated
        prefix. (Others may share what it has computed.)"""
        self.apart.add(conversation)

    def extend(self, conversation: Conversation, prompt: Sequence[int]) -> bool:
        """Let the prompt join the conversation, and share the chunks that others have of its
        context. False: another turn is computing some of them; nothing has changed, and the caller
        asks again in the next step.

        1. If the named origin runs, wait until it has computed all that both begin with.
        2. Find the chunks of the designated prefix, and more chunks by their tokens. Wait while one
           of them is being computed.
        3. The prompt joins. Share what was found, then what the origin has.

        The last token of the prompt does not count: we compute it, since the reply is sampled
        there. With chunks of 4 and a prompt of 8 tokens, 7 count: chunk 0 is shared, chunk 1 is
        not."""
        origin, prompt = self._origin(conversation), array("i", prompt)
        shareable = (conversation.tokens + prompt)[:-1]
        if conversation in self.apart:
            origin, shareable = None, shareable[:0]
        if origin and runs(origin) and origin.known < common_length(shareable, origin.tokens):
            return False
        prefix, found = self._in_common(conversation, shareable, self.designated), []
        for chunk in self.beginnings.find(conversation, shareable, prefix):
            if chunk.filled < self.chunk_size and any(map(runs, chunk.users)):
                return False
            found.append(chunk)
        super().extend(conversation, prompt)
        self._use(conversation, found or prefix)    # `found` is empty without a tenant
        if origin:
            self._use(conversation, self._in_common(conversation, shareable, origin))
        return True

    def _origin(self, conversation: Conversation) -> Conversation | None:
        """The origin that was named for its next turn. None if that has another tenant."""
        origin = self.origins.get(conversation.order)
        same = origin and self.beginnings.same_tenant(conversation, origin)
        return origin if same else None

    def _in_common(self, conversation: Conversation, tokens: Sequence[int],
                   origin: Conversation) -> list[Chunk]:
        """The full chunks that `tokens`, the context of the conversation, have in common with the
        first `known` tokens of the origin. Empty if the conversation has a chunk of its own."""
        if conversation.chunks != origin.chunks[:len(conversation.chunks)]:
            return []
        common = common_length(tokens, origin.tokens[:origin.known])
        return origin.chunks[:common // self.chunk_size]

    def _use(self, conversation: Conversation, chunks: list[Chunk]):
        """The conversation, which does not run, shares these chunks, the first ones of its context.
        Where it has KV already, it keeps that."""
        for index, chunk in enumerate(chunks):
            own = conversation.chunks[index] if index < len(conversation.chunks) else None
            if own and (own is chunk or has_or_gets_kv(own)):
                continue
            if own:                                         # it is absent
                self._stop_using(own, conversation)
            conversation.chunks[index:index + 1] = [chunk]
            if self.designated not in chunk.users:
                self._make_room(chunk)
                chunk.users += (conversation,)
                conversation.known = max(conversation.known, (index + 1) * self.chunk_size)
        self._note_change(conversation)

    def _make_room(self, chunk: Chunk):
        """Before one more user comes: if the chunk has MOST_USERS, the one that has been idle
        longest leaves it, and gets an absent chunk instead. Who runs or waits stays. So does
        who has no tenant, since it could not find the chunk again. If nobody may leave, the chunk
        has more than MOST_USERS."""
        if len(chunk.users) < MOST_USERS:
            return
        idle = [user for user in chunk.users
                if self.beginnings.has_tenant(user) and not (user.pinned or user.waiting)]
        if idle:
            user = min(idle, key=lambda user: user.last_active)
            user.chunks[chunk.index] = Chunk(user.alone, chunk.index)       # an absent one
            self._stop_using(chunk, user)
            self.maybe_cold[user.order] = user

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        swap_in = super().admit(conversation, total, now)
        # Its KV is not computed yet: others with this prompt find the chunks, and wait for them.
        # -1: the last token is fed only to sample.
        self.beginnings.file(conversation, total - 1)
        origin = self._origin(conversation) or self._nearest(conversation)
        self.origins.pop(conversation.order, None)
        if origin and conversation not in self.apart:
            self._copy_tail(conversation, origin)
        return swap_in

    def release(self, conversation: Conversation, now: float):
        super().release(conversation, now)
        self.beginnings.file(conversation, conversation.known)              # its reply, too

    def _nearest(self, conversation: Conversation) -> Conversation | None:
        """Nobody named an origin. From whom may `_copy_tail` copy? Of those who use the last chunk
        that the conversation shares: the one that has most tokens in common in the chunk behind.
        None if it shares none, or has no tenant. In chunks of 4:

            conversation    [ 0 .. 3 ]   [ 4  5  6  9 ]
            a                   ^        [ 4  5  8  8 ]     2 in common
            b                   ^        [ 4  5  6  7 ]     3 in common: b"""
        shared = [chunk for chunk in conversation.chunks if len(chunk.users) > 1]
        if not shared or not self.beginnings.has_tenant(conversation):
            return None
        start = (shared[-1].index + 1) * self.chunk_size
        behind = slice(start, start + self.chunk_size)
        others = [user for user in shared[-1].users if user is not conversation]
        return max(others, key=lambda other: common_length(
            conversation.tokens[behind], other.tokens[behind]))

    def _copy_tail(self, conversation: Conversation, origin: Conversation):
        """Copy the KV that the conversation has in common with its origin in the first chunk behind
        those that it shares. It has its slots already. In chunks of 4, if the common tokens are
        those of positions 0 to 9:

            origin            [    ]   [    ]   [ 8  9  10  11 ]
            conversation        ^        ^      [ 8  9 ]        the next step begins with two copies

        The origin may have lost these slots meanwhile, or their KV may be on its way from the CPU.
        Then the conversation computes its tokens itself."""
        pairs = zip(conversation.chunks, origin.chunks)
        chunk, source = next((pair for pair in pairs if pair[0] is not pair[1]), (None, None))
        if not chunk or chunk.filled or not source.slots:
            return
        start = chunk.index * self.chunk_size
        common = common_length(conversation.tokens[:-1], origin.tokens)
        end = min(common, start + source.filled)
        arriving = source.ticket and source.ticket.direction == "in"
        if end > start and not arriving:
            for target, slot in zip(chunk.slots, source.slots[:end - start]):
                # All sources are read before any target is written. If `slot` is itself a target
                # of this step, it has no KV yet, so we copy from its source: 7 -> 8 and 8 -> 9
                # become 7 -> 8 and 7 -> 9.
                self.slot_copies[target] = self.slot_copies.get(slot, slot)
            self.computed(conversation, start, end)

    # ---- what the core does, with the designated prefix and the index of beginnings

    def _trim(self, chunk: Chunk):
        # It is not full. (If its users once had KV for all of it, `release` files it again.)
        self.beginnings.discard(chunk)
        super()._trim(chunk)

    def _stop_using(self, chunk: Chunk, conversation: Conversation):
        super()._stop_using(chunk, conversation)
        if not chunk.users:
            self.beginnings.discard(chunk)

    def drop_all(self, conversation: Conversation):
        """It goes on sharing the designated prefix."""
        super().drop_all(conversation)
        known = conversation.tokens[:-1]
        self._use(conversation, self._in_common(conversation, known, self.designated))

    def drop_everything(self):
        for chunk in self.designated.chunks:
            self._empty(chunk)
        super().drop_everything()

    def forget(self, conversation: Conversation):
        self.origins.pop(conversation.order, None)
        self.apart.discard(conversation)
        super().forget(conversation)
        self.beginnings.roots.pop(conversation, None)

    def check_integrity(self):
        integrity.check(self, [self.designated, *self.conversations.values()])
        self.beginnings.check_integrity(self.conversations.values())


def runs(conversation: Conversation) -> bool:
    """(The designated prefix is pinned, but does not run.)"""
    return conversation.row is not None


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two contexts begin with in common: 2 for [1, 2, 3] and [1, 2, 4, 5]."""
    length = min(len(a), len(b))
    same = np.equal(a[:length], b[:length])
    return length if same.all() else int(same.argmin())
