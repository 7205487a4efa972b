"""The server of lab 7: which engine its author would open for a load of many users.

    the grader's worker  -->  open_engine  -->  Engine  <--  turns of a load that nobody has seen

Policy, flags, admission and sharing are free. The machine is not: the worker says how many slots
and places it has.

Invariant, as everywhere: replies are those of a full recompute.
"""
from engine import Engine


def open_engine(worker, clock) -> Engine:
    """The engine that serves on this worker.

    worker: a SimulatedWorker; it has num_slots, num_places and chunk_size, which stay as they are.
    clock(): the time in seconds. Users call `submit(prompt, conversation, max_tokens=...)`, and
    somebody else calls `step`. A subclass of Engine may do more in both."""
    class Sharing(Engine):
        """Conversations share the beginnings that they have in common."""

        def submit(self, prompt, conversation=None, **options):
            return super().submit(prompt, conversation, tenant="everybody", **options)
    # Replies are short here: running turns grow little.
    return Sharing(worker=worker, clock=clock, reserve=0.02)
