"""Beam search against that of transformers, and how little of the cache it takes."""
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from beam import beam_search
from engine import Engine
from eviction import RecomputeCost

VOCAB, CONTEXT = 61, 128
COST = RecomputeCost({32: 1e-3, 128: 3e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=256, cpu_cache_tokens=128, chunk_size=8, max_batch_tokens=32,
            debug=True)
PROMPT = [(17 * i + 5) % VOCAB for i in range(21)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    """A random model that is sure enough of some tokens for beams to differ from greedy replies."""
    torch.manual_seed(0)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=48, n_layer=2,
                                           n_head=3, bos_token_id=1, eos_token_id=1))
    else:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=CONTEXT, hidden_size=48, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, eos_token_id=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.fixture
def engine(model, tmp_path):
    model.save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), **TINY)
    yield engine
    engine.close()


def theirs(model, prompt, width, max_tokens, stop_ids=None):
    """What transformers finds. Without a penalty for length the scores are sums, and its search ends as
    ours does."""
    found = model.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=max_tokens,
        do_sample=False, length_penalty=0.0, early_stopping="never", eos_token_id=stop_ids, pad_token_id=-1,
        return_dict_in_generate=True, output_scores=True)
    padded = found.sequences[:, len(prompt):].tolist()
    replies = [[token for token in reply if token >= 0] for reply in padded]
    return list(zip(replies, found.sequences_scores.tolist()))


def assert_same(ours, theirs):
    assert [reply for reply, _ in ours] == [reply for reply, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("width, max_tokens", [(2, 1), (2, 12), (5, 20), (30, 3)])
def test_the_replies_are_those_of_transformers(model, engine, width, max_tokens):
    ours = beam_search(engine, PROMPT, width, max_tokens, ignore_eos=True)
    assert_same(ours, theirs(model, PROMPT, width, max_tokens))
    assert all(len(reply) == max_tokens for reply, _ in ours)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("places", [(0,), (5, 2), (3, 4, 9)])
def test_stop_tokens_finish_replies_as_in_transformers(model, engine, width, places):
    """Stop tokens at these places of the likeliest reply without any, so that they do matter."""
    ((likeliest, _),) = beam_search(engine, PROMPT, 1, 10, ignore_eos=True)
    engine.worker.stop_ids = frozenset(likeliest[place] for place in places)
    steps = engine.scheduler.steps
    ours = beam_search(engine, PROMPT, width, 16)
    steps = engine.scheduler.steps - steps
    if width > 1:               # with one beam, transformers would be greedy
        assert_same(ours, theirs(model, PROMPT, width, 16, sorted(engine.worker.stop_ids)))
    else:
        greedy = engine.generate(PROMPT, max_tokens=16)
        assert [reply for reply, _ in ours] == [greedy.token_ids] and steps == len(greedy.token_ids)
    assert any(reply[-1] in engine.worker.stop_ids and len(reply) < 16 for reply, _ in ours)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_replies_do_not_depend_on_the_cache(model, engine, tmp_path, depth):
    """A search in a few slots, a step ahead or not, while others use the cache."""
    ours = beam_search(engine, PROMPT, 4, 12, ignore_eos=True)
    small = Engine(str(tmp_path), **TINY | dict(gpu_cache_tokens=48, cpu_cache_tokens=32, max_running=3))
    small.depth = depth
    if depth:
        small.start()                                               # then a thread of its own steps
    others = [small.submit(PROMPT[:9 + n], max_tokens=12, ignore_eos=True) for n in range(3)]
    assert_same(beam_search(small, PROMPT, 4, 12, ignore_eos=True), ours)
    assert all(len(other.result().token_ids) == 12 for other in others)
    assert small.stats()["prompt_tokens_recomputed"] > 0        # the pressure is real
    small.close()


def test_a_search_may_fill_the_whole_context(model, engine):
    prompt = 6 * PROMPT
    assert_same(beam_search(engine, prompt, 2, 2, ignore_eos=True), theirs(model, prompt, 2, 2))


def test_beams_share_full_chunks_and_copy_the_rest(engine):
    """Only new tokens are computed: the prompt once, then one token for each beam and step."""
    shared, copied, computed = [], [], []

    def watch(batch):
        computed.append(sum(span.end - span.start for span in batch.spans))
        copied.append(len(batch.slot_copies))
        running = [span.request.conversation for span in batch.spans]
        slots = {slot for conversation in running for chunk in conversation.chunks for slot in chunk.slots}
        shared.append(sum(conversation.room for conversation in running) - len(slots))

    engine.watchers.append(watch)
    beam_search(engine, PROMPT, 4, 12, ignore_eos=True)
    assert computed == [21] + 11 * [4]
    contexts = range(21, 32)                # of the parents, in chunks of 8
    assert copied == [0] + [4 * (context % 8) for context in contexts]
    # All four share the prompt's full chunks, 3 * 16 slots; some of them share chunks of replies, too.
    assert shared[0] == 0 and shared[1:4] == 3 * [48] and all(slots >= 48 for slots in shared[1:])
    assert engine.stats()["slots_free"] == 256 and engine.stats()["conversations"] == 0


@pytest.mark.parametrize("values, message", [
    (dict(width=0), "width must be an int of at least 1, got 0"),
    (dict(width=True), "width must be an int of at least 1, got True"),
    (dict(max_tokens=0), "max_tokens must be an int of at least 1, got 0"),
    (dict(prompt=[]), "prompt must be a list of at least one token id"),
    (dict(prompt=[VOCAB]), f"a token id must be an int from 0 to 60, got {VOCAB}"),
    (dict(prompt=6 * PROMPT, max_tokens=3),
     "prompt and max_tokens together must be at most 128 tokens, got 129")])
def test_what_cannot_be_served_is_refused(engine, values, message):
    with pytest.raises(ValueError, match=message):
        beam_search(engine, **dict(prompt=PROMPT, width=2, max_tokens=4) | values)


def test_a_search_that_fails_leaves_nothing_behind(engine):
    execute, batches = engine.worker.execute, []

    def fail_later(batch):
        batches.append(batch)
        if len(batches) == 5:
            raise OSError("the device has gone")
        return execute(batch)

    engine.worker.execute = fail_later
    with pytest.raises(RuntimeError, match="the device has gone"):
        beam_search(engine, PROMPT, 3, 12, ignore_eos=True)
    assert engine.stats()["conversations"] == 0 and engine.stats()["slots_free"] == 256
    assert len(beam_search(engine, PROMPT, 3, 4, ignore_eos=True)) == 3


def test_a_search_in_an_engine_that_is_closed_is_told(engine):
    engine.watchers.append(lambda batch: engine.close() if engine.scheduler.steps == 4 else None)
    with pytest.raises(RuntimeError, match="closed"):
        beam_search(engine, PROMPT, 3, 12, ignore_eos=True)
