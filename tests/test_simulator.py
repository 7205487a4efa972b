"""The simulated worker: its arithmetic by hand, its pipeline against a simulation of single layers, and the
decisions of an engine on it against those of an engine on a real worker."""
from itertools import count, groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from engine import Engine
from eviction import RecomputeCost
from kv_cache import Chunk, Ticket
from checkpoint import PRESETS
from scheduler import Batch, Span
from experiments.run import batch_by_request, drive
from experiments.simulator import (HARDWARE, OPERATORS, Hardware, Operators, SimulatedWorker, VirtualClock,
                                   kv_token_bytes)
from experiments.workload import PlannedConversation, PlannedTurn

ROUND = Hardware(flops=1e12, memory=1e9, host_link=1e6, peer_link=1e6)
IDEAL = Operators(matmul=1.0, attention=1.0, memory=1.0, link=1.0, per_layer=0.0, per_step=0.0)
SHAPE = SimpleNamespace(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, width=32, vocab_size=100,
                        matmul_parameters=5_000)


def worker(hardware=ROUND, operators=IDEAL, **options):
    return SimulatedWorker(SHAPE, hardware, operators, VirtualClock(), 64, 8, 64, chunk_size=4, **options)


def request(total, samples=True):
    return SimpleNamespace(conversation=SimpleNamespace(tokens=[0] * (total if samples else total + 1)))


def batch(*spans, swap_in=(), swap_out=()):
    made = Batch(0, 64)
    made.spans, made.swap_in, made.swap_out = [Span(*span) for span in spans], list(swap_in), list(swap_out)
    return made


def ticket(direction, filled=4):
    return Ticket(None, Chunk((), 0), direction, 0, filled, list(range(filled)), 0)


def test_time_passes_only_when_somebody_lets_it():
    clock = VirtualClock()
    assert clock() == clock() == 0
    clock.sleep(1.5)
    assert clock() == 1.5


def test_a_decode_is_bound_by_memory_and_a_prefill_by_flops():
    """K and V of a token: 2 layers x 2 heads x 8 x 2 bytes = 128 bytes. Weights and head: 8,200 x 2 bytes."""
    sim = worker()
    assert sim.token_bytes == kv_token_bytes(SHAPE, 2) == 128
    assert sim.linear_seconds(1, 1) == pytest.approx(16_400 / 1e9)
    assert sim.linear_seconds(10**6, 1) == pytest.approx(2 * (5_000 * 10**6 + 3_200) / 1e12)
    assert sim.attention_seconds(1, 1000) == pytest.approx(128_000 / 1e9)
    slow = worker(ROUND._replace(flops=1e6))
    # The queries at 2, 3 and 4 see 3, 4 and 5 positions.
    assert slow.attention_seconds(3, 5) == pytest.approx(4 * 2 * 4 * 8 * (3 + 4 + 5) / 1e6)


def test_their_attention_reads_k_and_v_for_each_query_head():
    """Two query heads share K and V. A prefill is bound by its products with either kernel."""
    slow = ROUND._replace(flops=1e6)
    ours, theirs = worker(), worker(operators=IDEAL._replace(per_query_head=True))
    assert theirs.attention_seconds(1, 1000) == pytest.approx(2 * ours.attention_seconds(1, 1000))
    assert theirs.copy_seconds([ticket("in")]) == ours.copy_seconds([ticket("in")])
    assert (worker(slow, IDEAL._replace(per_query_head=True)).attention_seconds(9, 9)
            == worker(slow).attention_seconds(9, 9))


def test_a_batch_pays_for_every_span_and_moves_the_clock():
    sim = worker(operators=IDEAL._replace(per_layer=0.5, per_step=2.0))
    result = sim.execute(batch((request(9), 8, 9), (request(6, samples=False), 0, 6)))
    assert result.tokens == [0] and result.landed == []
    attention = sim.attention_seconds(1, 9) + sim.attention_seconds(6, 6)
    assert sim.clock() == pytest.approx(3.0 + attention + 16_400 / 1e9)


def test_gpus_share_the_work_and_pay_for_the_reduction():
    one, four = worker(), worker(gpus=4)
    # 2 layers, 2 reductions each, 3/4 of 10 x 32 x 2 bytes there and back
    reduced = 2 * 2 * 2 * 3 / 4 * 10 * 32 * 2 / 1e6
    assert four.linear_seconds(10, 1) == pytest.approx(one.linear_seconds(10, 1) / 4 + reduced)
    assert four.attention_seconds(1, 50) == pytest.approx(one.attention_seconds(1, 50) / 4)


@given(st.floats(0, 10), st.floats(0.01, 10), st.integers(1, 6))
def test_the_pipeline_is_what_single_layers_do(copy, compute, layers):
    sim = worker()
    sim.shape = SimpleNamespace(**vars(SHAPE) | dict(num_layers=layers))
    arrived = done = 0.0
    for _ in range(layers):
        arrived += copy / layers
        done = max(done, arrived) + compute / layers
    assert sim.overlapped(copy, compute) == pytest.approx(done)
    sim.pipeline = False
    assert sim.overlapped(copy, compute) == pytest.approx(copy + compute)


def test_copies_end_when_the_link_has_carried_them():
    """4 tokens take 512 us. What goes out waits for what comes in, and for what went out before."""
    sim = worker(ROUND._replace(memory=1e12))
    first, second, back = ticket("out"), ticket("out"), ticket("in")
    assert sim.execute(batch((request(1), 0, 1), swap_out=[first])).landed == []
    begin = sim.clock()
    assert begin < 1e-6
    assert sim.execute(batch((request(1), 0, 1), swap_in=[back], swap_out=[second])).landed == [first, back]
    assert sim.clock() == pytest.approx(begin + 512e-6 / 0.81, rel=1e-3)       # both ways at once
    assert sim.execute(batch()).landed == [second]          # with nothing to compute it waits
    assert sim.clock() == pytest.approx(1144e-6, rel=1e-2)
    assert sim.execute(batch()).landed == []


def test_copies_both_ways_slow_each_other_down():
    """4 tokens take 512 us, or 512 / 0.81 = 632 us while others go the other way."""
    for earlier, seconds, out_ends in ((0.0, 632e-6, 632e-6), (256e-6, 572e-6, 316e-6), (1.0, 512e-6, 0.0)):
        sim = worker(ROUND._replace(memory=1e12))
        sim.execute(batch((request(1), 0, 1), swap_out=[ticket("out")]))
        sim.clock.sleep(earlier)
        begin = sim.clock()
        sim.execute(batch((request(1), 0, 1), swap_in=[ticket("in")]))
        assert sim.clock() - begin == pytest.approx(seconds, rel=1e-2)
        assert max(sim.out_ends - begin, 0.0) == pytest.approx(out_ends, rel=1e-2)


def test_the_profile_is_what_one_more_chunk_adds_to_a_full_batch():
    sim = worker(operators=IDEAL._replace(per_layer=0.5, per_step=2.0))
    cost = sim.profile()
    assert cost.lengths == [4, 8, 16, 32, 64]
    assert cost(64) == pytest.approx(sim.attention_seconds(4, 64) + 2 * 5_000 * 4 / 1e12, rel=1e-6)


def test_the_cost_of_a_chunk_of_opt_13b_is_a_fifth_of_a_chunk_alone():
    hardware, operators = HARDWARE["a100"], OPERATORS["eager"]
    sim = SimulatedWorker(PRESETS["opt-13b"], hardware, operators, VirtualClock(), 64, 8, 2048)
    assert sim.profile().rest == pytest.approx(3.97e-3, rel=1e-3)
    assert sim.linear_seconds(32, 0) == pytest.approx(21.6e-3, rel=1e-2)


# ---- in an engine

COST = RecomputeCost({4: 1.0, 64: 4.0}, rest=1.0)
TURNS = [("a", 9), ("b", 14), ("a", 5), ("c", 20), ("b", 6), ("ab", 7), ("c", 3), ("abc", 8), ("a", 11)]


def traces(**options):
    """The batches of a few conversations that do not fit together, however late their copies land."""
    engine = Engine(chunk_size=4, max_batch_tokens=16, debug=True, clock=count().__next__, cost=COST,
                    **options)
    seen = []
    for names, prompt in TURNS:
        handles = [engine.submit([1] * prompt, name, max_tokens=4, ignore_eos=True) for name in names]
        while any(handle.request is None or not handle.request.finish_reason for handle in handles):
            seen.append(str(engine.step()))
        seen += [handle.result().usage for handle in handles]
    engine.close()
    return seen


def test_a_simulated_engine_decides_as_a_real_one():
    """The same load and clock give the same spans, victims and transfers. Copies are instant, as on a CPU."""
    instant = ROUND._replace(host_link=float("inf"))
    simulated = SimulatedWorker(SHAPE, instant, IDEAL, VirtualClock(), 64, 10, 64, chunk_size=4)
    real, ours = traces(model="tiny_chat", gpu_cache_tokens=64, cpu_cache_tokens=40), traces(worker=simulated)
    steps = [step for step in real if isinstance(step, str)]
    assert any(" in " in step for step in steps) and any(" out " in step for step in steps)
    assert ours == real


def test_copies_begin_while_nobody_waits_for_a_reply():
    """a leaves 8 of 64 slots free, b needs 12; 100 s pass between them. (A copy of a chunk takes 512 us.)"""
    sim = worker(ROUND._replace(memory=1e12))
    engine = Engine(worker=sim, clock=sim.clock, chunk_size=4)
    users = [PlannedConversation("a", [PlannedTurn(53, 4)]),
             PlannedConversation("b", [PlannedTurn(12, 2)], 100.0)]
    _, b = drive(engine, users, seed=0, sleep=sim.clock.sleep)
    assert b.first_token - b.due < 512e-6


@pytest.mark.parametrize("requests, batches", [
    (dict(a=(22, 3, 0), b=(22, 6, 0), c=(4, 2, 1), d=(4, 2, 1)), "ab b cd"),  # c, d come while a and b run
    (dict(a=(20, 9, 0), b=(20, 2, 0), c=(20, 2, 0)), "ab a c")])              # two of three fit
def test_whole_requests_are_batched(requests, batches):
    """Nobody joins a batch before its last reply has ended. A request: prompt, reply, arrival."""
    sim = SimulatedWorker(SHAPE, ROUND, IDEAL._replace(per_step=1.0), VirtualClock(), 64, 8, 64, chunk_size=4)
    engine = Engine(worker=sim, clock=sim.clock, chunk_size=4, stateless=True)
    batch_by_request(engine.scheduler)
    seen = []
    engine.watchers.append(lambda batch: seen.append(
        "".join(sorted(span.request.conversation.name for span in batch.spans))))
    users = [PlannedConversation(name, [PlannedTurn(prompt, reply)], arrival)
             for name, (prompt, reply, arrival) in requests.items()]
    drive(engine, users, seed=0, sleep=sim.clock.sleep)
    assert [names for names, _ in groupby(seen) if names] == batches.split()


@pytest.mark.parametrize("warm, recomputed", [(0.0, 36), (5.0, 0)])
def test_a_hint_before_the_turn_saves_its_user_the_recomputation(warm, recomputed):
    """b's turn takes 52 of 64 slots, and there is no CPU tier; a returns 100 s later."""
    sim = SimulatedWorker(SHAPE, ROUND, IDEAL, VirtualClock(), 64, 0, 64, chunk_size=4)
    engine = Engine(worker=sim, clock=sim.clock, chunk_size=4)
    users = [PlannedConversation("a", [PlannedTurn(44, 4), PlannedTurn(4, 4, think_seconds=100.0)]),
             PlannedConversation("b", [PlannedTurn(48, 4)], 10.0)]
    _, _, a = drive(engine, users, seed=0, sleep=sim.clock.sleep, warm=warm)
    assert (a.usage["recomputed"], a.usage["gpu"]) == (recomputed, 47 - recomputed)
    assert a.recomputed_seconds > 0                     # with the hint as well: before the turn
    assert engine.stats()["hints"] == bool(warm)


def test_a_context_shorter_than_a_chunk_has_a_cost():
    short = SimulatedWorker(SHAPE, ROUND, IDEAL, VirtualClock(), 64, 8, max_context=3, chunk_size=4)
    assert short.profile()(3) > 0


def test_a_simulation_repeats_to_the_last_digit():
    def times():
        clock = VirtualClock()
        simulated = SimulatedWorker(PRESETS["opt-125m"], ROUND, IDEAL, clock, 64, 10, 64, chunk_size=4)
        engine = Engine(worker=simulated, clock=clock, chunk_size=4)
        ends = []
        for names, prompt in TURNS:
            for handle in [engine.submit([1] * prompt, name, max_tokens=4) for name in names]:
                handle.result()
                ends.append(clock())
        engine.close()
        return ends
    assert times() == times()
