"""A simulated worker whose tokens depend on all KV that a request reads: lab 7's judge of replies.

The KV of a token is a number here. It depends on the token, on its position, and on the KV before
it, as the slot table shows that; and so does the token that is sampled. Copies move these numbers
between slots and places. A stale slot, a wrong place or an outdated copy gives another token than
`full_recompute`, which reads no cache.

    context   17   42   99                seen = 0
    KV        k0   k1   k2                k0 = kv(0, 0, 17)    k1 = kv(k0, 1, 42)    ...
    slots    [ 7]  [3]  [4]               the next token comes from k0 + k1 + k2

All numbers move when a batch is launched, and in the order of `execute`; but a place is written when
its copy out lands. Times, and what has landed, come from the simulated worker.
"""
from collections import Counter

import numpy as np

from checkpoint import PRESETS
from experiments.simulator import HARDWARE, OPERATORS, SimulatedWorker, VirtualClock
from scheduler import Result

VOCABULARY = 50_000
ALL_BITS = (1 << 64) - 1


def kv(seen: int, position: int, token: int) -> int:
    """seen: the sum of the KV before it."""
    mixed = (seen ^ (token * 0x9E3779B97F4A7C15 + position + 1)) * 0xD6E8FEB86659FD93 & ALL_BITS
    return mixed ^ mixed >> 32


def full_recompute(context: list[int], count: int) -> tuple[list[int], list[int]]:
    """The next `count` tokens behind the context, and the KV of all tokens but the last of them."""
    tokens, kvs, seen = list(context), [], 0
    while len(tokens) < len(context) + count:
        for position in range(len(kvs), len(tokens)):
            kvs.append(kv(seen, position, tokens[position]))
            seen = seen + kvs[-1] & ALL_BITS
        tokens.append(seen % VOCABULARY)
    return tokens[len(context):], kvs


class CheckingWorker(SimulatedWorker):
    """OPT-13B on an A100."""

    def __init__(self, num_slots: int, num_places: int, max_context: int, slow_link: float = 1.0):
        """slow_link: copies take so many times as long."""
        machine = HARDWARE["a100"]
        machine = machine._replace(host_link=machine.host_link / slow_link)
        super().__init__(PRESETS["opt-13b"], machine, OPERATORS["eager"], VirtualClock(),
                         num_slots, num_places, max_context)
        self.vocab_size = VOCABULARY
        self.kv = np.zeros(num_slots, np.uint64)        # what each slot holds
        self.position = np.full(num_slots, -1)          # of which position that is the KV
        self.places = {}                                # place -> kv, position
        self.leaving = {}                               # ticket of a copy out -> kv, position
        self.table = {}                                 # row -> slots by position
        self.first_misread = None
        self.busy_seconds = 0.0                         # of steps with spans
        self.sampled = 0                                # tokens
        self.computed = Counter()                       # tokens, by conversation
        self.different = set()                          # all KV that was ever computed

    @property
    def recomputed(self) -> int:
        """Tokens whose KV had been computed before, for whatever conversation."""
        return self.computed.total() - len(self.different)

    def execute(self, batch) -> Result:
        for row, start, slots in batch.table_updates:
            self.table.setdefault(row, np.zeros(self.max_context, int))[start:start + len(slots)] = slots
        for target, source in batch.slot_copies.items():
            self.kv[target], self.position[target] = self.kv[source], self.position[source]
        for ticket in batch.swap_in:
            self.arrive(ticket, batch.step)
        for ticket in batch.swap_out:                   # as they are before this batch's spans
            self.leaving[ticket] = self.kv[ticket.slots], self.position[ticket.slots]
        tokens = [(span, self.compute(span, batch.step)) for span in batch.spans]
        begin = self.clock()
        landed = super().execute(batch).landed
        if batch.spans:
            self.busy_seconds += self.clock() - begin
        for ticket in landed:
            if ticket.direction == "out":
                self.places[ticket.place] = self.leaving.pop(ticket)
        sampled = [token for span, token in tokens if span.samples]
        self.sampled += len(sampled)
        return Result(sampled, landed)

    def arrive(self, ticket, step: int):
        """Copy what its place holds into the ticket's slots: nothing, if nothing was ever written."""
        held, positions = self.places.get(ticket.place, ((), ()))
        if len(held) < ticket.filled and not self.first_misread:
            first, name = ticket.start, ticket.conversation.name
            self.first_misread = (f"in step {step} the place of {name}[{first}:{first + ticket.filled}] "
                                  f"holds {len(held)} of {ticket.filled} tokens: an outdated copy?")
        slots = ticket.slots[:len(held)]
        self.kv[slots], self.position[slots] = held[:len(slots)], positions[:len(slots)]

    def compute(self, span, step: int) -> int:
        """Fill the span's slots, and return the token behind it."""
        request, start, end = span
        name, tokens = request.conversation.name, request.conversation.tokens
        slots = self.table[request.conversation.row][:end]
        seen, computed = int(self.kv[slots[:start]].sum()), []
        misread = np.flatnonzero(self.position[slots[:start]] != np.arange(start))
        if misread.size and not self.first_misread:
            first = misread[0]
            held = self.position[slots[first]]
            self.first_misread = (f"in step {step} the span {name}[{start}:{end}] reads position {first} in "
                                  f"a slot that holds {f'that of {held}' if held >= 0 else 'nothing'}")
        for position in range(start, end):
            computed.append(kv(seen, position, tokens[position]))
            seen = seen + computed[-1] & ALL_BITS
        self.kv[slots[start:]], self.position[slots[start:]] = computed, range(start, end)
        self.computed[name] += len(computed)
        self.different.update(computed)
        return seen % VOCABULARY
