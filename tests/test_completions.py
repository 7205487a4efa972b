"""/v1/completions: texts and ids are continued, and what a prompt's tokens are worth is told as transformers
computes it."""
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from clients import CONTEXT, ROOT, connect, eventually, fetch, serving
from engine import Engine
from serving.sessions import Sessions
from serving.tokenizer import TextStream, load_tokenizer

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=3 * CONTEXT, cpu_cache_tokens=3 * CONTEXT,
                        max_batch_tokens=48, debug=True)
    with serving(sessions) as server:
        yield server


@pytest.fixture
def complete(server):
    """Calls openai's client."""
    client = connect(server.url)
    return lambda prompt, **options: client.completions.create(model="ascii", prompt=prompt, **options)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """What transformers finds of some ids: (the log probability of each but the first, the log
    probabilities of all tokens behind each position)."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def find(ids):
        with torch.inference_mode():
            all_of_them = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return all_of_them[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist(), all_of_them
    return find


def ids_of(text):
    """Of the tokenizer that clients.py makes."""
    return [ord(character) - 32 for character in text]


def one(completion):
    choice, = completion.choices
    return choice


def test_a_text_and_its_ids_are_continued_alike(complete):
    text, ids = (one(complete(prompt, max_tokens=12)) for prompt in (PROMPT, ids_of(PROMPT)))
    assert text.text == ids.text and len(text.text) in range(1, 13) and text.logprobs is None
    streamed = list(complete(PROMPT, max_tokens=12, stream=True, stream_options=dict(include_usage=True)))
    assert "".join(chunk.choices[0].text for chunk in streamed[:-1]) == text.text
    assert streamed[-2].choices[0].finish_reason == text.finish_reason
    assert streamed[-1].usage.prompt_tokens == len(PROMPT) and not streamed[-1].choices
    assert {chunk.usage for chunk in streamed[:-1]} == {None}


def test_sixteen_tokens_are_the_default(complete):
    completion = complete(PROMPT, extra_body=dict(ignore_eos=True))
    assert completion.usage.completion_tokens == 16 and one(completion).finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_several_prompts_with_several_choices(complete, stream):
    """The choices of the first prompt come first; a prompt's tokens count once."""
    prompts = [PROMPT, ids_of("Once upon"), "And then"]
    given = complete(prompts[:2], n=2, temperature=1, seed=3, max_tokens=5, stream=stream, echo=True)
    texts = {}
    for part in given if stream else [given]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    for index, text in texts.items():
        prompt = [PROMPT, "Once upon"][index // 2]
        alone = one(complete(prompt, temperature=1, seed=3 + index % 2, max_tokens=5, echo=True))
        assert text == alone.text and text.startswith(prompt)
    assert sorted(texts) == [0, 1, 2, 3]
    if not stream:
        assert given.usage.prompt_tokens == len(PROMPT) + len("Once upon")


def test_a_stop_string_ends_it_and_echo_gives_the_prompt_back(complete):
    whole = one(complete(PROMPT, max_tokens=12, extra_body=dict(ignore_eos=True))).text
    cut = one(complete(PROMPT, max_tokens=12, stop=[whole[4:6]], echo=True))
    assert cut.text == PROMPT + whole[:whole.index(whole[4:6])] and cut.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_the_log_probabilities_are_those_of_transformers(complete, reference, stream, max_tokens, n,
                                                         monkeypatch):
    """The prompt is longer than a step, which takes 48 tokens, and has logits for 10 of them at once.
    It was computed before: that changes nothing."""
    monkeypatch.setattr("scoring.ROWS_AT_ONCE", 10)
    given = complete(PROMPT, max_tokens=max_tokens, logprobs=3, echo=True, n=n, stream=stream,
                     extra_body=dict(ignore_eos=True))
    choices = {}
    for part in given if stream else [given]:
        for choice in part.choices:
            text, told = choices.setdefault(choice.index, ("", []))
            told += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs,
                        choice.logprobs.text_offset)
            choices[choice.index] = text + choice.text, told
    assert len(choices) == n
    for text, told in choices.values():
        tokens, logprobs, most_likely, offsets = zip(*told)
        ids = [96 if len(token) > 1 else ord(token) - 32 for token in tokens]
        assert len(ids) == len(PROMPT) + max_tokens and text.startswith(PROMPT)
        assert all(text[offset:].startswith(token) or len(token) > 1
                   for token, offset in zip(tokens, offsets))
        if 96 in ids:                                       # which of the special tokens it is: no matter
            ids = ids[:ids.index(96)]
        expected, all_of_them = reference(ids)
        assert logprobs[0] is most_likely[0] is None
        assert list(logprobs[1:len(ids)]) == pytest.approx(expected, abs=1e-3)
        for place, found in enumerate(most_likely[1:len(ids)]):
            best = all_of_them[place].topk(3).values.tolist()
            assert sorted(found.values())[-3:] == pytest.approx(sorted(best), abs=1e-3)
            assert found[tokens[place + 1]] == logprobs[place + 1] and len(found) in (3, 4)


def test_a_beginning_that_was_computed_before_is_not_computed_again(complete):
    """Whole chunks of 32, of completions and chats alike; not with another salt, and not for the log
    probabilities of the prompt."""
    examples = "Q: one? A: two. " * 8
    salt = dict(cache_salt="few shots")

    def cached(question, **options):
        usage = complete(examples + question, max_tokens=2, extra_body=salt, **options).usage
        assert usage.prompt_tokens == len(examples + question)
        return usage.prompt_tokens_details.cached_tokens
    assert len(examples) == 128 and cached("first?") == 0
    assert cached("second?") >= 128
    assert cached("third?", logprobs=1) >= 128
    assert cached("fourth?", logprobs=1, echo=True) == 0
    assert cached("fifth?", echo=True) >= 128
    assert complete(examples + "sixth?", extra_body=dict(cache_salt="other")
                    ).usage.prompt_tokens_details.cached_tokens == 0


def test_another_key_shares_nothing_and_sees_nothing(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with serving(sessions, api_keys=["a" * 20, "b" * 20]) as server:
        cached, seen = [], []
        for key in "a" * 20, "a" * 20, "b" * 20:
            usage = connect(server.url, key).completions.create(model="ascii", prompt=PROMPT).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
            picture = fetch(server, "GET", "/cache", headers=dict(Authorization=f"Bearer {key}"))[1]
            seen.append([entry["id"][:5] for entry in picture["conversations"]])
        assert [bool(tokens) for tokens in cached] == [False, True, False]
        assert seen == [["cmpl-"], ["cmpl-"] * 2, ["cmpl-"]]


def test_prompts_in_flight_share_what_they_begin_with(complete):
    examples = "Is it so? It is. " * 8
    usage = complete([examples + str(n) for n in range(8)], max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= 7 * 128


def test_a_scored_prompt_is_computed_once_for_all_choices(server, complete):
    computed = server.engine.stats()["prompt_tokens_new"]
    complete("?" + PROMPT, n=3, max_tokens=1, logprobs=1, echo=True)
    assert server.engine.stats()["prompt_tokens_new"] - computed < 1.5 * len(PROMPT)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_scored_turn_of_a_conversation_uses_nothing_of_others(checkpoint, depth):
    """Others of its tenant have computed what it goes on with, and left no logits."""
    engine = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, debug=True)
    engine.depth = depth
    try:
        first, new = ids_of(PROMPT)[:40], ids_of(PROMPT)[40:]
        said = engine.generate(first, "b", tenant="o", max_tokens=4, ignore_eos=True).token_ids
        engine.generate(first + said + new, "c", tenant="o", max_tokens=1)
        handle = engine.submit(new, "b", tenant="o", max_tokens=1, prompt_logprobs=1)
        handle.result()
        assert None not in handle.prompt_logprobs
    finally:
        engine.close()


def test_nothing_is_stored_and_the_latest_prompts_stay_cached_alone(server, complete, monkeypatch):
    monkeypatch.setattr("serving.sessions.MOST_UNSTORED", 3)
    stored = server.sessions.history.conversations()
    for number in range(6):
        complete(f"prompt {number}", max_tokens=1)
    complete([PROMPT] * 2, max_tokens=1, n=2, logprobs=0, echo=True)
    for _ in range(4):                                  # who hangs up pushes nobody out
        stream = complete(PROMPT, max_tokens=CONTEXT - 200, stream=True, extra_body=dict(ignore_eos=True))
        next(iter(stream))
        stream.close()
        eventually(lambda: not server.at_work)
    assert server.sessions.history.conversations() == stored
    names = [name for name in server.engine.cache.conversations if str(name).startswith("cmpl-")]
    assert len(names) == 3
    assert server.engine.cache.apart <= {*server.engine.cache.conversations.values()}


def test_a_designated_prefix_is_computed_again_for_its_log_probabilities(checkpoint):
    """Though its KV is pinned, it has left no logits."""
    engine = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, debug=True)
    try:
        engine.designate(ids_of(PROMPT)[:64])
        prompt = ids_of(PROMPT)
        engine.generate(prompt, max_tokens=1)
        handles = [engine.submit(prompt, max_tokens=2, prompt_logprobs=k) for k in (None, 2)]
        shared, scored = (handle.result().usage for handle in handles)
        assert (shared["gpu"], scored["gpu"]) == (64, 0)
        assert [score is None for score in handles[1].prompt_logprobs] == [True] + [False] * (len(prompt) - 1)
        assert handles[0].prompt_logprobs is None
    finally:
        engine.close()


@pytest.mark.parametrize("fields, named", [
    (dict(suffix="end"), "suffix"), (dict(prompt=""), "prompt"), (dict(prompt=[]), "prompt"),
    (dict(prompt=[[]]), "prompt[0]"), (dict(prompt=[1, "a"]), "prompt[0]"),
    (dict(prompt=[-1]), "prompt[0][0]"),
    (dict(prompt=["Hi", [1, 10**6]]), "prompt[1] should have token ids below"), (dict(prompt=None), "prompt"),
    (dict(prompt=5), "prompt should be a string, a list of strings, or of token ids"),
    (dict(prompt=["Hi", ""]), "prompt[1] should have"),
    (dict(prompt=["Hi"] * 20, n=100), "replies at most, got 2000"), (dict(logprobs=6), "logprobs"),
    (dict(logprobs=True), "logprobs"), (dict(best_of=2), "best_of"), (dict(max_tokens=-1), "max_tokens"),
    (dict(messages=[dict(role="user", content="Hi")]), "messages"), (dict(top_logprobs=2), "top_logprobs"),
    (dict(max_tokens=10**6), "maximum context length"), (dict(prompt="a" * 10**4), "maximum context length"),
    (dict(stream_options=dict(include_usage=True)), "stream_options")])
def test_what_cannot_be_served_is_refused_by_name(server, fields, named):
    status, answer = fetch(server, "POST", "/v1/completions", dict(prompt="Hi") | fields)
    assert status == 400 and named in answer["error"]["message"], answer


def test_bytes_that_are_no_character_are_spelled():
    """The tokenizer cuts an emoji into its bytes."""
    prompt = "Zo\u00eb \U0001f600!"
    with serving(Sessions(ROOT / "tiny_chat", gpu_cache_tokens=256, cpu_cache_tokens=0)) as server:
        choice = fetch(server, "POST", "/v1/completions", dict(
            prompt=prompt, max_tokens=0, echo=True, logprobs=5))[1]["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    spelled = [bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
               for token in tokens]
    assert b"".join(spelled).decode() == choice["text"] == prompt
    assert any(token.startswith("bytes:") for token in tokens) and len(tokens) == len(offsets)
    assert offsets == sorted(offsets) and offsets[-1] == len(prompt) - 1 and offsets[0] == 0


def test_no_stop_string_counts_before_min_tokens(complete):
    options = dict(ignore_eos=True)
    whole = one(complete(PROMPT, max_tokens=12, extra_body=options)).text
    options["min_tokens"] = 6
    late = one(complete(PROMPT, max_tokens=12, stop=list(set(whole)), extra_body=options))
    assert late.text == whole[:5] and late.finish_reason == "stop"


def test_a_choice_that_cannot_begin_ends_all(server, complete, monkeypatch):
    submit, calls = server.engine.submit, []

    def submit_two(*arguments, **options):
        calls.append(options)
        if len(calls) == 3:
            raise ValueError("prompt must be shorter")
        return submit(*arguments, **options)
    monkeypatch.setattr(server.engine, "submit", submit_two)
    with pytest.raises(openai.BadRequestError, match="must be shorter"):
        complete([PROMPT] * 3, max_tokens=CONTEXT - 200, extra_body=dict(ignore_eos=True))
    assert not server.engine.stats()["running"] and not server.at_work


def test_every_choice_of_every_prompt_counts_as_a_turn(server, complete):
    most = server.most_turns
    with server.counted("", most - 5), pytest.raises(openai.RateLimitError):
        complete(["Hi"] * 3, n=2)
    assert len(complete(["Hi"] * 3, n=2, max_tokens=1).choices) == 6


def test_who_hangs_up_ends_all_choices(server, complete):
    stream = complete([PROMPT, "Hi"], n=2, max_tokens=CONTEXT - 200, stream=True,
                      extra_body=dict(ignore_eos=True))
    next(iter(stream))
    assert server.engine.stats()["running"]
    stream.close()
    eventually(lambda: not server.engine.stats()["running"] and not server.at_work)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_of_a_request_that_was_suspended_is_told_once(checkpoint, reference, depth):
    """What it has generated meanwhile belongs to no prompt."""
    engine = Engine(checkpoint, gpu_cache_tokens=128, cpu_cache_tokens=64, max_batch_tokens=16, chunk_size=8,
                    debug=True)
    engine.depth = depth
    try:
        prompts = [ids_of(PROMPT)[start:start + 21] for start in range(4)]
        handles = [engine.submit(prompt, max_tokens=50, ignore_eos=True, prompt_logprobs=1)
                   for prompt in prompts]
        for handle, prompt in zip(handles, prompts):
            assert len(handle.result().token_ids) == 50
            first, *told = handle.prompt_logprobs
            assert first is None and set(handle.request.prompt_logprobs) == set(range(1, 21))
            assert [logprob for logprob, _ in told] == pytest.approx(reference(prompt)[0], abs=1e-3)
        assert engine.stats()["suspensions"]
    finally:
        engine.close()


def test_a_prompt_that_is_computed_token_by_token(checkpoint, reference):
    """Each span is then as short as a decode's."""
    engine = Engine(checkpoint, gpu_cache_tokens=128, cpu_cache_tokens=0, max_batch_tokens=1)
    try:
        handle = engine.submit(ids_of("Hello there"), max_tokens=1, prompt_logprobs=0)
        handle.result()
        assert [logprob for logprob, _ in handle.prompt_logprobs[1:]] == pytest.approx(
            reference(ids_of("Hello there"))[0], abs=1e-3)
    finally:
        engine.close()


def test_a_text_that_goes_on_keeps_its_first_space():
    tokenizer = SimpleNamespace(pieces={1: b" a"}, drops_first_space=True)
    assert [TextStream(tokenizer, goes_on=goes_on).push(1) for goes_on in (False, True)] == ["a", " a"]


@pytest.mark.parametrize("bos", [False, True], ids=["plain", "bos"])
@pytest.mark.parametrize("name", ["tiny_chat", "gpt2"])
def test_special_tokens_and_bos_are_as_transformers_gives_them(checkpoint, name, bos, tmp_path):
    source = checkpoint if name == "gpt2" else ROOT / name
    for file in source.glob("*.json"):
        shutil.copy(file, tmp_path)
    if bos:
        spec = json.loads((tmp_path / "tokenizer.json").read_text())
        first = spec["added_tokens"][0]
        piece, text = dict(SpecialToken=dict(id="X", type_id=0)), dict(Sequence=dict(id="A", type_id=0))
        special = dict(X=dict(id="X", ids=[first["id"]], tokens=[first["content"]]))
        spec["post_processor"] = dict(type="TemplateProcessing", single=[piece, text], pair=[piece, text],
                                      special_tokens=special)
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(ours.as_written("Hello")) == len(ours.encode("Hello")) + bos
    for text in ["Hello", "", " two  spaces", *theirs.all_special_tokens, "a" + theirs.all_special_tokens[0]]:
        assert ours.as_written(text) == theirs(text).input_ids
