"""labs/exam.md: the project's own code gives the answers."""
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import test_simulator
from attention_kernel import SpanTensors, multi_token_attention_reference
from eviction import RecomputeCost, RetentionValue
from fakes import World
from scheduler import Batch
from test_kv_cache import finish, grow_to, idle, make, states
from test_scheduler import admitted

sys.path.append(str(Path(__file__).parents[1] / "labs" / "tests"))
from grading import block_of_the_handout  # noqa: E402


def attend(scores, values, q_lens, kv_lens):
    """A query's score of each position, the numbers that stand there -> the result of each query."""
    positions = len(values)
    k = torch.tensor(scores).reshape(positions, 1, 1)
    v = torch.tensor(values).reshape(positions, 1, 1)
    table = torch.arange(positions, dtype=torch.int32).repeat(len(q_lens), 1)
    spans = SpanTensors.build(range(len(q_lens)), q_lens, kv_lens)
    return multi_token_attention_reference(torch.ones(sum(q_lens), 1, 1), k, v, table, spans)[:, 0, 0]


def question_1():
    out = attend([0.0] * 7, [*map(float, range(7))], [1, 3, 2], [7, 3, 6])
    return [" ".join(f"{number:.1f}" for number in part) for part in out.split([1, 3, 2])]


def question_2():
    request, batch = admitted(22, [4, 0, 4, 2, 0, 0]), Batch(0, budget=7)
    batch.take(request)
    return [f"missing {request.missing()}", str(batch)]


def question_3():
    def steps(**switches):
        world = World(slots=64, max_batch_tokens=6, swap_threshold=0, **switches)
        world.submit("a", 3, 4)
        world.submit("b", 9, 2)
        world.step()
        world.step()
        world.submit("c", 4, 2)
        world.run()
        return world.worker.traces
    return [*steps(), "with --separate-phases", *steps(separate_phases=True)]


def question_4():
    world = World(slots=16, places=0, swap_threshold=0, reserve=0)
    _, b = world.submit("a", 6, 6), world.submit("b", 6, 6)
    world.run()
    return [*world.worker.traces, "b: " + ", ".join(f"{source} {n}" for source, n in b.usage.items())]


def question_5():
    cache = make()
    a = idle(cache, "a", 6)
    tickets = cache.plan_swap_out(6, 1.0)
    grow_to(cache, a, 12)
    finish(cache, tickets)
    return [", ".join(map(str, states(a))), f"{len(cache.free_places)} of 8 places are free",
            f"chunks_swapped_out {cache.stats['chunks_swapped_out']}"]


def question_6():
    cache = make(slots=64)
    b = idle(cache, "b", 24)
    finish(cache, cache.plan_swap_out(12, 1.0))
    idle(cache, "a", 20, now=2.0)
    return [f"shortfall {cache.shortfall(b, 40, 6)}",
            f"copies    {words(cache.plan_swap_out_for(b, 40, 6, now=100.0))}"]


def words(tickets):
    return " ".join(f"{ticket.conversation.name}[{ticket.start}:{ticket.end}]" for ticket in tickets)


def question_7():
    policy = RetentionValue(RecomputeCost({1000: 1.0, 3000: 5.0}, rest=2.0), chunk_size=1000)
    return [f"after {later:2} s    x {policy.value(0, 6 + later):.3f}    y {policy.value(2, 18 + later):.3f}"
            for later in (0, 3, 12)]


def question_8():
    def asked(name, victims):
        """How often the index asks for a value."""
        cache = make(slots=1000, policy=name)
        for number in range(20):
            idle(cache, f"c{number}", 40, now=float(number))
        cache.refile()
        value, count = cache.policy.value, 0

        def counted(key, idle):
            nonlocal count
            count += 1
            return value(key, idle)
        cache.policy.value = counted
        cache.plan_swap_out(4 * victims, 100.0)
        return count
    return [f"{name}: {asked(name, 1)}, {asked(name, 2)}" for name in ("retention", "lru")]


def question_9():
    worker = test_simulator.worker()
    worker.shape = SimpleNamespace(num_layers=5)
    return [f"copies of {copy} ms: {worker.overlapped(copy, 50):.0f} ms" for copy in (30, 50, 80)]


def question_10():
    scores, values = [score * math.log(2) for score in (3, 1, 2, 4)], [4.0, 8.0, 0.0, 12.0]
    pieces = [attend(scores[i:i + 2], values[i:i + 2], [1], [2]).item() for i in (0, 2)]
    return [f"{pieces[0]:.1f} and {pieces[1]:.1f}", f"{attend(scores, values, [1], [4]).item():.1f}"]


QUESTIONS = [question_1, question_2, question_3, question_4, question_5, question_6, question_7,
             question_8, question_9, question_10]


@pytest.mark.parametrize("number, question", list(enumerate(QUESTIONS, 1)))
def test_the_answer_is_what_the_code_does(number, question):
    assert block_of_the_handout("exam", f"text answer {number}") == question()
