"""Streams and events that record what happens before what. They stand for CUDA's in a KVPool on the CPU.

    recorder = Recorder(pool)
    with recorder:
        pool.swap_in(tickets)
        pool.wait(0)
        use layer 0
    recorder.races()

Every operation runs at once, in the order of the program, so its result is right even if a stream forgot to
wait. A GPU may run the streams' operations in any other order that the events allow. So the recorder notes of
each access to the pool's memory what must have ended before it, as a vector clock:

    main   store a0 ----- record e ------------------ wait for f --- read b0
                             |                             ^
    in                    wait for e --- write b0 --- record f

    a0 happens before "write b0", since `in` waited for e: its clock {main: 1, in: 1} includes a0 = (main, 1).
    Without e, nothing orders the two.

Two accesses to the same K or V of a token *race* if one of them writes and nothing orders them.
"""
import contextlib
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Stream:
    """A queue of operations. `clock`: the latest operation, of each stream, that ends before its next one
    begins."""

    def __init__(self, name: str):
        self.name = name
        self.clock: dict[str, int] = {}

    def learn(self, clock: dict[str, int]):
        for name, number in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), number)

    def wait_event(self, event: "Event"):
        self.learn(event.clock)

    def wait_stream(self, stream: "Stream"):
        self.learn(stream.clock)


class Event:
    """A point of a stream. An event that was never recorded is no reason to wait, as in CUDA."""

    def __init__(self, host: Stream, ended):
        """host: it learns what has ended. ended: answers whether the GPU has reached an event by now."""
        self.host, self.ended = host, ended
        self.clock: dict[str, int] = {}
        self.synchronized = False

    def record(self, stream: Stream):
        self.clock = dict(stream.clock)

    def synchronize(self):
        self.synchronized = True
        self.host.learn(self.clock)

    def query(self) -> bool:
        """True also tells the host that everything before has ended."""
        found = self.synchronized or self.ended(self)
        if found:
            self.host.learn(self.clock)
        return found

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


class Access(NamedTuple):
    """An operation that touches elements of one tier."""
    label: str                  # what the test was doing
    stream: str
    number: int                 # in its stream
    clock: dict[str, int]       # what has ended before it, itself included
    tier: str                   # "gpu" or "cpu"
    vectors: frozenset[int]     # each is the K or the V of one token in one layer, by its place in the tier
    writes: bool

    def before(self, other: "Access") -> bool:
        return other is not self and other.clock.get(self.stream, 0) >= self.number


class OperatorWatcher(TorchDispatchMode):
    """Sees every operator of torch while it is entered."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False            # else torch would import its whole compiler, which takes seconds


class Recorder(OperatorWatcher):
    """Puts recording streams into a pool, and notes its accesses while it is entered (`with recorder:`)."""

    def __init__(self, pool, ended=lambda event: False):
        """ended: see Event. By default no event is reached before the host waits for it."""
        super().__init__()
        self.pool, self.ended, self.label, self.accesses = pool, ended, "", []
        self.running, self.host = Stream("main"), Stream("host")
        pool.stream, pool.on, pool.event = lambda: self.running, self.on, self.event
        pool.stream_in, pool.stream_out = Stream("in"), Stream("out")
        self.events = []

    def event(self) -> Event:
        self.events.append(Event(self.host, self.ended))
        return self.events[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.running = self.running, stream
        yield
        self.running = before

    @property
    def host_waited(self) -> bool:
        return any(event.synchronized for event in self.events)

    @contextlib.contextmanager
    def doing(self, label: str):
        """Accesses made meanwhile get this label."""
        before, self.label = self.label, label
        yield
        self.label = before

    def labelled(self, label: str, tier: str | None = None, writes: bool | None = None) -> list[Access]:
        return [access for access in self.accesses if access.label == label and tier in (None, access.tier)
                and writes in (None, access.writes)]

    def races(self) -> list[tuple[Access, Access]]:
        """Pairs of accesses that race. Of several to the same vector, only the latest ones are compared."""
        found, last_write, reads_since = {}, {}, {}
        for access in self.accesses:
            for vector in access.vectors:
                key = access.tier, vector
                earlier = [last_write[key]] if key in last_write else []
                if access.writes:
                    earlier += reads_since.pop(key, [])
                    last_write[key] = access
                else:
                    reads_since.setdefault(key, []).append(access)
                for other in earlier:
                    if not other.before(access):
                        found[id(other), id(access)] = other, access
        return list(found.values())

    # ---- which operation touches what

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        touched = list(self.touched(operator, args))
        if touched:
            stream = self.running
            stream.learn(self.host.clock)       # the host starts it only now
            number = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
            for tier, vectors, writes in touched:
                self.accesses.append(Access(self.label, stream.name, number, dict(stream.clock), tier,
                                            vectors, writes))
        return operator(*args, **(kwargs or {}))

    def touched(self, operator, args):
        """(tier, vectors, writes) for each argument that lies in a tier. A view, and a new tensor of the same
        kind, touch nothing."""
        name = operator._schema.name.removeprefix("aten::").rstrip("_")
        if name.startswith("new_") or name.endswith("_like"):
            return
        for argument, value in zip(operator._schema.arguments, args):
            tier, alias = self.tier_of(value), argument.alias_info
            if tier and (alias is None or alias.is_write):
                yield tier, self.selected(name, value, args), alias is not None

    def tier_of(self, value) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage().data_ptr()
        for name, tier in (("gpu", self.pool.gpu), ("cpu", self.pool.cpu)):
            if tier.untyped_storage().data_ptr() == storage:
                return name
        return None

    def selected(self, name: str, value: torch.Tensor, args) -> frozenset[int]:
        """The vectors of `value` that the operator touches: those at its indices, if it takes any."""
        heads, head_dim = self.pool.gpu.shape[-2:]
        with _disable_current_modes():
            storage = torch.arange(value.untyped_storage().nbytes() // value.element_size())
            elements = storage.as_strided(value.size(), value.stride(), value.storage_offset())
            if name in ("index", "index_put"):
                elements = elements[tuple(slice(None) if index is None else index for index in args[1])]
            elif name in ("index_copy", "index_select", "index_add", "index_fill"):
                elements = elements.index_select(args[1], args[2])
            return frozenset((elements // (heads * head_dim)).flatten().tolist())
