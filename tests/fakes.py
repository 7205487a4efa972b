"""A worker without a model, whose memory can be checked: each slot and each place remembers which prefix of
tokens its KV stands for."""
import random
import zlib
from array import array
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np

from eviction import POLICIES, RecomputeCost
from guesses import GuessingScheduler
from kv_cache import KVCache
from scheduler import PLACEHOLDER, Batch, Request, Result, Scheduler
from sharing import SharingCache

UNKNOWN = array("i", [PLACEHOLDER])
# What schedulers ask a Sampling. (sampling.py needs torch; labs 2 and 3 do not.)
GREEDY = SimpleNamespace(looks_back=False)
COST = RecomputeCost({4: 1.0, 64: 6.0}, rest=1.0)        # rises within the few chunks of a test


def prefix(tokens, length) -> int:
    """What the KV of position length - 1 depends on: every token up to there."""
    return zlib.crc32(tokens[:length].tobytes())


def answer(tokens) -> int:
    """The fake model: the next token is a function of the whole context."""
    return prefix(tokens, len(tokens)) % 50


class FakeWorker:
    """Computes prefixes instead of KV. Copies end late and out of step: `land` says which of those in
    flight end now. A copy out reads its slots, and a copy in reads its place, at the beginning or at the
    end of the copy, as chance will have it."""
    vocab_size, stop_ids = 50, frozenset()

    def __init__(self, cache: KVCache, land=lambda tickets: list(tickets), seed=0):
        self.cache, self.land, self.random = cache, land, random.Random(seed)
        self.table = np.full_like(cache.table, -1)
        self.sampled = {}                      # the last token sampled in each row
        self.slots, self.places = {}, {}
        self.flying = {}                       # ticket -> what it carries, None until it is read
        self.traces = []

    def execute(self, batch: Batch) -> Result:
        self.traces.append(str(batch))
        for row, start, slots in batch.table_updates:
            self.table[row, start:start + len(slots)] = slots
        copied = {target: self.slots[source] for target, source in batch.slot_copies.items()}
        self.slots.update(copied)
        for ticket in batch.swap_in + batch.swap_out:
            self.flying[ticket] = self.read(ticket) if self.random.random() < 0.5 else None
        for span in batch.spans:
            self.wait(span.request.conversation)
            conversation, tokens = span.request.conversation, self.tokens(span)
            for position in range(span.start, span.end):
                slot = self.table[conversation.row, position]
                self.slots[slot] = prefix(tokens, position + 1)
        for span in batch.spans:
            self.check(span)
        samples = [(span, answer(self.tokens(span))) for span in batch.spans if span.samples]
        for span, token in samples:
            self.sampled[span.request.conversation.row] = token
        behind = [token for guess in batch.guesses for token in self.behind(guess)]
        landed = self.land(self.flying) or list(self.flying)[:not batch.spans]
        return Result([token for _, token in samples] + behind, [self.arrive(ticket) for ticket in landed])

    def behind(self, guess):
        """Compute the guesses' KV; yield the tokens behind them."""
        tokens = guess.request.conversation.tokens[:]
        for position, token in enumerate(guess.tokens, guess.start):
            tokens.append(token)
            assert len(tokens) == position + 1 and PLACEHOLDER not in tokens
            self.slots[self.table[guess.conversation.row, position]] = prefix(tokens, position + 1)
            yield answer(tokens)

    def tokens(self, span) -> array:
        """Those of its conversation, as the device knows them."""
        tokens = span.request.conversation.tokens[:]
        if tokens[-1:] == UNKNOWN:
            tokens[-1] = self.sampled[span.request.conversation.row]
        return tokens

    def check(self, span):
        """Everything the span reads is there, and is what it is believed to be."""
        conversation, tokens = span.request.conversation, self.tokens(span)
        for position in range(span.end):
            content = self.slots.get(self.table[conversation.row, position])
            expected = prefix(tokens, position + 1)
            assert content == expected, f"{conversation.name}[{position}] is not in its slot"

    def wait(self, conversation):
        for ticket in self.flying:
            if ticket.chunk in conversation.chunks and ticket.direction == "in":
                self.write(ticket)

    def read(self, ticket):
        if ticket.direction == "out":
            return [self.slots.get(slot) for slot in ticket.slots]
        return list(self.places[ticket.place])

    def write(self, ticket):
        if self.flying[ticket] != "written":
            content = self.flying[ticket] or self.read(ticket)
            if ticket.direction == "out":
                self.places[ticket.place] = content
            else:
                self.slots.update(zip(ticket.slots, content))
            self.flying[ticket] = "written"

    def arrive(self, ticket):
        self.write(ticket)
        del self.flying[ticket]
        return ticket


class World:
    """A scheduler and a fake worker with a clock of our own."""

    def __init__(self, slots=32, places=8, chunk=4, rows=4, limit=None, policy="retention", land=None,
                 seed=0, prefix=(), depth=0, stop_ids=(), guesses=0, **switches):
        """prefix: tokens that are designated. depth: how many batches the scheduler is ahead of what it
        is told. stop_ids: of every request. guesses: at most, for each decode."""
        self.depth, self.unsettled, self.stop_ids = depth, deque(), frozenset(stop_ids)
        self.cache = SharingCache(slots, places, chunk, rows, limit or slots, POLICIES[policy](COST, chunk))
        self.prefix = list(prefix)
        self.cache.designate(prefix)
        make_scheduler = partial(GuessingScheduler, guesses) if guesses else Scheduler
        self.scheduler = make_scheduler(self.cache, limit or slots - len(prefix),
                                        **{"max_batch_tokens": 16, **switches})
        self.worker = FakeWorker(self.cache, land or (lambda tickets: list(tickets)), seed)
        self.now = 0.0
        self.salt = 0                          # tells one prompt from the next

    def submit(self, name, prompt, max_tokens=4, like=None, tenant=None):
        """prompt: ids, or how many. like: a request with this prompt."""
        self.salt += 11
        if isinstance(prompt, int):
            prompt = [(7 * i + self.salt) % 50 for i in range(prompt)]
        prompt = list(prompt)
        request = Request(self.cache.open(name), prompt, max_tokens, stop_ids=self.stop_ids,
                          sampling=GREEDY)
        if tenant is not None:
            self.cache.own(request.conversation, tenant)
        if like:
            self.cache.follow(request.conversation, like.conversation)
        self.scheduler.submit(request)
        return request

    def fork(self, name, child, length, more=()):
        """A new conversation of the first tokens of another, and more, which it takes for known."""
        parent = self.cache.conversations[name]
        known = [token for token in parent.tokens[:length] if token != PLACEHOLDER]
        return self.cache.fork(parent, child, known + list(more))

    def step(self, dt=1.0):
        self.now += dt
        batch = self.scheduler.schedule(self.now)
        if batch or self.cache.in_flight and not self.unsettled:
            self.unsettled.append((batch, self.worker.execute(batch)))
            self.scheduler.launched(batch)
        while len(self.unsettled) > (self.depth if batch.spans and not batch.guesses else 0):
            self.scheduler.account(*self.unsettled.popleft(), self.now)
        self.cache.check_integrity()
        return batch

    def run(self, steps=1000):
        """Until nothing is left to do; returns the traces of these steps."""
        begin = len(self.worker.traces)
        while self.scheduler.busy or self.unsettled:
            self.step()
            steps -= 1
            assert steps, "no end in sight: " + "\n".join(self.worker.traces[-20:])
        return self.worker.traces[begin:]

    def turn(self, name, prompt, max_tokens=4):
        request = self.submit(name, prompt, max_tokens)
        traces = self.run()
        return request, traces
