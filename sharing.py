"""Conversations that begin alike share chunks: a layer over kv_cache.py.

Two replies to one message have the whole conversation before it in common. The KV of a position depends on
the tokens up to there and on nothing else, so both conversations can use the same chunks:

    chunk            0        1        2        3        4
    a              [ s0 ]   [ s1 ]   [ s2 ]   [ a3 ]   [ a4 ]
    b, a fork        ^        ^        ^      [ b3 ]              a.chunks[2] is b.chunks[2]

    a.holders = [a, S0, S1, S2]      b.holders = [b, S0, S1, S2]      S0.used_by = {a, b}

If a and b also begin chunk 3 with the same tokens, b gets their KV as a copy, from slots of a to its own,
when it is admitted. So only full chunks are shared (those with a token at each position), and nobody writes
other KV into a slot that others use. (PagedAttention shares the chunk that is not full, too, and copies it
when one of its users first writes there.) Nobody searches for conversations that begin alike: the caller
names the *origin*, by `fork` or `follow`.

To the core every chunk has one *holder*, and eviction looks at holders only. At first the holder of a chunk
is its conversation. When we share the chunk, we hand it over to a *stem*: a holder that nobody talks to, with
that one chunk and its users (S0 above). The stem goes with its last user.

`admit` pins every holder of the conversation that runs, stems too. A pinned stem is in no index and offers no
slots, so its chunk is safe until its last running user is released. A stem waits while a turn of any user
waits. It has been idle since the latest run of a user ended. A chunk with three users is worth three times as
much. Whoever recomputes a shared chunk does it for all users; only if one step takes it for two of them, both
compute it.

The *designated prefix* (the operator's system prompt) is a conversation that is pinned for good. A
conversation that has no chunk yet shares those full chunks of it with which its context begins.

Invariant: the shared chunks of a conversation come first, and chunk i of them is held by holders[1 + i].
"""
import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kv_cache import Chunk, Conversation, KVCache, Ticket


class Stem(Conversation):
    """Holds one chunk for its users, which are conversations. It has no tokens and never runs."""

    def __init__(self, chunk: Chunk, number: int):
        """number: no other stem has it. In a trace the stem bears the name of its first user."""
        holder, toward = chunk.holder, chunk.holder.toward
        # Among chunks that are worth the same and idle for as long, the lowest order leaves first: those of
        # conversations, then those of stems, and among stems the one at the end that the policy takes from.
        # (At least 2**40, the order is above that of every conversation; the number makes it unique.)
        nth_to_leave = chunk.index if toward > 0 else 2**20 - chunk.index
        super().__init__(holder.name, (1 + nth_to_leave) * 2**40 + number, (), holder.chunk_size, toward)
        self.chunks = [chunk]
        self.used_by: dict[int, Conversation] = {}       # by order
        self.last_active = holder.last_active

    @property
    def users(self) -> int:
        return len(self.used_by)


class SharingCache(KVCache):
    """A KVCache whose conversations may share their first chunks."""

    def __init__(self, *sizes_and_policy):
        super().__init__(*sizes_and_policy)
        self.origins: dict[int, Conversation] = {}      # by the order of who follows, see `follow`
        self.designate(())

    # ---- what can be shared

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
        self.prefix = array("i", tokens[:full * self.chunk_size])
        order, toward = next(self.orders), self.policy.toward
        self.designated = Conversation("prefix", order, self.prefix, self.chunk_size, toward)
        self.designated.known = len(self.prefix)
        self.designated.pins = math.inf
        self.designated.chunks = [Chunk(self.designated, index) for index in range(full)]

    def fork(self, origin: Conversation, name: str | None, tokens: Iterable[int]) -> Conversation:
        """A new conversation made from `tokens`, which begin like those of `origin`.

        It shares the full chunks of what they have in common, wherever these are and whatever the origin is
        doing. With its first turn it also gets what it has in common behind these: see `follow`."""
        assert name not in self.conversations
        conversation = self.open(name, tokens)
        self._share(conversation, conversation.tokens[:conversation.known], origin)
        self.follow(conversation, origin)
        return conversation

    def follow(self, conversation: Conversation, origin: Conversation):
        """The next turn of `conversation` uses what `origin` has computed, as far as both begin alike: it
        shares full chunks and copies what is behind them. While the origin computes the same prompt, this
        turn waits at the head of the queue, and all others behind it: one prompt, n replies."""
        self.origins[conversation.order] = origin

    def extend(self, conversation: Conversation, prompt: Sequence[int]) -> bool:
        """The prompt joins the conversation's tokens, and what it has in common with others is shared.
        False while the origin still computes the same: then the caller asks again later.

        The last token of the prompt stays the conversation's own, since its reply is sampled there. With
        chunks of 4 and a prompt of 8, chunk 0 is shared and chunk 1 is not."""
        origin, prompt = self.origins.get(conversation.order), array("i", prompt)
        shareable = (conversation.tokens + prompt)[:-1]
        if origin and origin.row is not None and origin.known < common_length(shareable, origin.tokens):
            return False
        super().extend(conversation, prompt)
        if origin:
            self._share(conversation, shareable, origin)
        self._share(conversation, shareable, self.designated)
        return True

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        swap_in = super().admit(conversation, total, now)
        if origin := self.origins.pop(conversation.order, None):
            self._copy_tail(conversation, origin)
        return swap_in

    def _copy_tail(self, conversation: Conversation, origin: Conversation):
        """Copy the KV that the conversation has in common with its origin in the first chunk behind those
        that it shares. It has its slots already. In chunks of 4, if the common tokens are those of positions
        0 to 9:

            origin            [ s0 ]   [ s1 ]   [ 8  9  10  11 ]
            conversation        ^        ^      [ 8  9 ]            the next step begins with two copies

        The origin may have lost these slots meanwhile, or their KV may be on its way from the CPU. Then the
        conversation computes its tokens itself."""
        index = len(conversation.holders) - 1
        if index >= len(origin.chunks) or conversation.chunks[index].filled:
            return
        source, start = origin.chunks[index], index * self.chunk_size
        end = min(common_length(conversation.tokens[:-1], origin.tokens), start + source.filled)
        arriving = source.ticket and source.ticket.direction == "in"
        if end > start and source.slots and not arriving:
            for target, slot in zip(conversation.chunks[index].slots, source.slots[:end - start]):
                # All copies happen at once, so a copy of a copy is one of the original.
                self.slot_copies[target] = self.slot_copies.get(slot, slot)
            self.computed(conversation, start, end)

    def _share(self, conversation: Conversation, tokens: Sequence[int], origin: Conversation):
        """The conversation, whose context begins with `tokens`, shares the full chunks that these have in
        common with the first `known` tokens of the origin. Nothing happens if the conversation holds chunks
        of its own already."""
        shared = len(conversation.holders) - 1
        if len(conversation.chunks) > shared:
            return
        common = common_length(tokens, origin.tokens[:origin.known])
        for chunk in origin.chunks[:common // self.chunk_size]:
            if chunk.holder is origin:          # all of these, so that the origin's shared chunks come first
                self._hand_to_stem(chunk)
            if chunk.index >= shared:           # the conversation takes those that it lacks
                self._join(conversation, chunk.holder)
                conversation.chunks.append(chunk)

    def _hand_to_stem(self, chunk: Chunk):
        stem = Stem(chunk, next(self.orders))
        self._join(chunk.holder, stem)
        chunk.holder = stem
        self._update(chunk)                     # the totals of both holders follow

    # ---- who uses a stem

    def _join(self, conversation: Conversation, stem: Stem):
        conversation.holders.append(stem)
        stem.used_by[conversation.order] = conversation
        self._count_user(conversation, stem, +1)

    def _leave(self, conversation: Conversation):
        """The conversation, which has no chunks but shared ones, leaves its last stem."""
        stem = conversation.holders.pop()
        conversation.chunks.pop()
        del stem.used_by[conversation.order]
        self._count_user(conversation, stem, -1)
        if stem.used_by:
            stem.name = next(iter(stem.used_by.values())).name
        else:
            self.forget(stem)

    def _count_user(self, user: Conversation, stem: Stem, sign: int):
        stem.pins += sign * user.pins
        stem.waiting += sign * user.waiting
        self._note_change(stem)
        self._note_change(user)

    # ---- what the core does, with shared chunks

    def truncate(self, conversation: Conversation, length: int, known: int):
        """What is shared stays with its other users. The core may shorten only chunks that the conversation
        holds, so we tell it to keep all others. Then the conversation leaves the stems that are not wholly
        in `known`."""
        full, shared = known // self.chunk_size, len(conversation.holders) - 1
        super().truncate(conversation, length, max(known, shared * self.chunk_size))
        conversation.known = min(conversation.known, known)
        while len(conversation.holders) > 1 + full:
            self._leave(conversation)

    def drop_all(self, conversation: Conversation):
        """It goes on sharing the designated prefix."""
        super().drop_all(conversation)
        self._share(conversation, conversation.tokens[:-1], self.designated)

    def drop_everything(self):
        for chunk in self.designated.chunks:
            self._empty(chunk)
        super().drop_everything()

    def forget(self, conversation: Conversation):
        self.origins.pop(conversation.order, None)
        super().forget(conversation)

    def _update_cold(self, conversation: Conversation):
        super()._update_cold(conversation)
        if isinstance(conversation, Stem) and conversation.pins < math.inf:
            for user in conversation.used_by.values():          # they may be cold now, or cold no more
                super()._update_cold(user)

    def _is_cold(self, conversation: Conversation) -> bool:
        """No conversation is cold while a chunk that it shares is cached. Chunks of the designated prefix do
        not count: they stay for ever."""
        shares = any(stem.present and stem.pins < math.inf for stem in conversation.holders[1:])
        return super()._is_cold(conversation) and not shares

    # ---- checking

    def check_integrity(self):
        super().check_integrity()
        users: dict[Stem, list[Conversation]] = {}
        for conversation in [*self.conversations.values(), self.designated]:
            stems = conversation.holders[1:]
            assert [chunk.holder for chunk in conversation.chunks[:len(stems)]] == stems
            assert all(chunk.holder is conversation for chunk in conversation.chunks[len(stems):])
            for stem in stems:
                users.setdefault(stem, []).append(conversation)
        for stem, its in users.items():
            assert stem.used_by == {user.order: user for user in its}
            assert stem.pins == sum(user.pins for user in its)
            assert stem.waiting == sum(user.waiting for user in its)

    def _all_holders(self) -> set[Conversation]:
        return super()._all_holders() | {*self.designated.holders}


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two contexts begin with in common: 2 for [1, 2, 3] and [1, 2, 4, 5]."""
    length = min(len(a), len(b))
    same = np.equal(a[:length], b[:length])
    return length if same.all() else int(same.argmin())
