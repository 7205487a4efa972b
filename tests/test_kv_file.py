"""The KV of both tiers survives a restart in a file; and whatever becomes of the file, no token changes."""
import hashlib
import json
import os
import random
import re
import signal
import stat
import threading
import urllib.request
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kv_file
from clients import ask, connect, eventually, user
from engine import Engine
from eviction import RecomputeCost
from kv_file import KVFile, SavedConversation, SavedKV, layout_of, sha256_hex
from parallel import Leader
from server import open_server, parse_flags
from serving.sessions import Sessions
from test_exactness import assert_exact

COST = RecomputeCost({32: 1e-3, 256: 3e-3}, rest=1e-3)
VOCAB = 97


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, the model of transformers): random, and the next token depends on all of the context."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=256, hidden_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=80, eos_token_id=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return str(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv.safetensors"


def make_engine(model, **flags):
    flags = dict(gpu_cache_tokens=256, cpu_cache_tokens=512, chunk_size=8, max_batch_tokens=48,
                 max_running=4) | flags
    return Engine(model[0], cost=COST, debug=True, device="cpu", **flags)


def opened(path, engine, contexts):
    """The file, all loaded. contexts: the tokens that we have of each conversation."""
    file = KVFile(path, engine, "history", lambda name: array("i", contexts.get(name, ())))
    file.load()
    file.loader.join()
    return file


def stop(file):
    file.engine.close()
    file.close()


def say(engine, contexts, name, prompt, n=6, **options):
    """One turn. Its reply; contexts[name] grows."""
    reply = engine.generate(prompt, name, context=contexts.get(name, ()), max_tokens=n, ignore_eos=True,
                            **options)
    contexts[name] = contexts.get(name, []) + prompt + reply.token_ids
    return reply


def ids(n, seed=0):
    return [random.Random(1000 * seed + i).randrange(2, VOCAB) for i in range(n)]


def write(model, path, lengths, **flags):
    """A file with conversations of so many tokens; their contexts."""
    engine, contexts = make_engine(model, **flags), {}
    file = opened(path, engine, contexts)
    for number, (name, length) in enumerate(lengths.items()):
        say(engine, contexts, name, ids(length - 6, number))
    stop(file)
    return contexts


def lines(capsys):
    return capsys.readouterr().err.splitlines()


# ---- back on the CPU tier

def test_after_a_restart_all_of_it_is_on_the_cpu_tier(model, path, capsys):
    contexts = write(model, path, dict(a=90, b=41))
    engine = make_engine(model)
    opened(path, engine, contexts)
    assert engine.stats()["cpu_chunks_free"] == 64 - 12 - 5
    for name in "ab":
        before = contexts[name]
        reply = say(engine, contexts, name, [5])
        assert reply.usage["cpu"] == len(before) - 1 and reply.usage["recomputed"] == 0
        assert_exact(model[1], before + [5], reply.token_ids)
    said = capsys.readouterr().err
    assert re.fullmatch(rf"KV file {path}: there is none yet\n"
                        rf"KV file {path}: 17 chunks, [\d.]+ MiB, written in [\d.]+ s\n"
                        rf"KV file {path}: 17 of 17 chunks are back after [\d.]+ s\n", said)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("flags", [
    {}, dict(gpu_cache_tokens=160, cpu_cache_tokens=96),
    dict(policy="trailing-half", gpu_cache_tokens=192, cpu_cache_tokens=60, chunk_size=5)], ids=str)
def test_answers_are_exact_over_restarts(model, path, tmp_path, flags, depth):
    """Sessions with branches, stopped after every few turns, while some turn is still running."""
    rng, contexts, restored = random.Random(7), {None: []}, 0               # by turn
    for number in range(3):
        sessions = Sessions(make_engine(model, **flags), history=tmp_path / "history", kv_file=path)
        sessions.engine.depth = depth
        if rng.random() < 0.5:
            sessions.kv_file.loader.join()              # else turns come while chunks are coming back
        for i in range(5):
            base = rng.choice(list(contexts)[-6:])
            turn = base and sessions.history.turn(base)
            name = turn.conversation if turn and rng.random() < 0.6 else f"{number}.{i}"
            head = sessions.history.head(name)
            if len(contexts[base]) > 100 or head and head.id != base:
                continue
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 40))]
            reply = sessions.submit(prompt, name, base=turn, max_tokens=rng.randint(1, 12), ignore_eos=True)
            answer = reply.result()
            assert_exact(model[1], contexts[base] + prompt, answer.token_ids)
            contexts[reply.id] = contexts[base] + prompt + answer.token_ids
        running = sessions.submit([3] * 30, "running", max_tokens=50, ignore_eos=True)
        for _ in range(rng.randint(0, 9)):
            sessions.engine.step()
        sessions.close()
        assert running.handle.reply.finish_reason == "cancelled"
        restored += sessions.kv_file.restored
    assert restored > 5


def test_what_was_dropped_is_recomputed_and_nothing_else(model, path):
    """The leading chunks are worth least: they leave first, and what is behind them comes back."""
    engine, contexts = make_engine(model, gpu_cache_tokens=128, cpu_cache_tokens=64), {}
    file = opened(path, engine, contexts)
    say(engine, contexts, "a", ids(90))
    say(engine, contexts, "b", ids(90, 1))
    chunks = [chunk.filled for chunk in engine.cache.conversations["a"].chunks]
    assert chunks[0] == 0 < chunks[-1]
    stop(file)
    engine = make_engine(model, cpu_cache_tokens=64)
    opened(path, engine, contexts)
    for name in "ab":
        before = contexts[name]
        reply = say(engine, contexts, name, [5])
        assert_exact(model[1], before + [5], reply.token_ids)
        assert (reply.usage["cpu"] > 0) == (name == "b")        # b is idle for less: it is worth more


def test_the_worthiest_come_back_if_the_tier_is_smaller_now(model, path):
    contexts = write(model, path, dict(a=90, b=90))
    for places in (3, 20):
        engine = make_engine(model, cpu_cache_tokens=8 * places)
        saved = opened(path, engine, contexts).saved
        worthiest = {(saved.conversations[chunk.users[0]].name, chunk.number)
                     for chunk in saved.chunks[:places]}
        assert worthiest == {(name, chunk.index) for name, one in engine.cache.conversations.items()
                             for chunk in one.chunks if chunk.filled}
        assert ("b", 11) in worthiest and ("a", 0) not in worthiest


def test_a_file_is_no_larger_than_the_tier(model, path):
    write(model, path, dict(a=90, b=90), cpu_cache_tokens=24)           # on the GPU tier is all of it
    with safe_open(path, "pt") as file:
        assert len(file.get_tensor("kv")) == 3


def test_who_runs_gets_nothing(model):
    cache = make_engine(model).cache
    one = cache.open("a", ids(60))
    one.pinned = True
    assert cache.restore([one], 2, 8) is None and cache.restore([], 2, 8) is None
    one.pinned = False
    assert cache.restore([one], 2, 8) == 0 and cache.restore([one], 2, 8) is None
    cache.check_integrity()
    cache = make_engine(model, cpu_cache_tokens=0).cache
    assert cache.restore([cache.open("a", ids(60))], 2, 8) is None


def test_a_reply_that_a_stop_string_has_cut(model, path):
    """Then the last token has KV, too."""
    contexts, engine = {}, make_engine(model)
    file = opened(path, engine, contexts)
    say(engine, contexts, "a", ids(60))
    engine.shorten("a", 62)
    del contexts["a"][62:]
    stop(file)
    engine, before = make_engine(model), contexts["a"]
    opened(path, engine, contexts)
    reply = say(engine, contexts, "a", [5])
    assert reply.usage["cpu"] == 62
    assert_exact(model[1], before + [5], reply.token_ids)


def test_beginnings_are_filed_beside_a_turn_that_runs(model, path):
    """At depth 1 the host does not know the last token when it launches: no key may stand for that."""
    contexts, engine = write(model, path, dict(a=60)), make_engine(model)
    engine.depth, file = 1, opened(path, engine, contexts)
    handle = engine.submit(ids(20), "b", tenant="ada", max_tokens=30, ignore_eos=True)
    while not handle.reply:
        engine.step()                                           # with debug=True it checks all keys
        file._file_beginnings()


# ---- what is not the same any more

def test_a_conversation_that_has_changed(model, path):
    """It has grown: its chunks come back. It has other tokens, or is gone: they do not."""
    contexts = write(model, path, dict(grown=60, shorter=60, other=60, gone=60))
    contexts["grown"] += ids(10)
    del contexts["shorter"][30:], contexts["gone"]
    contexts["other"][20] ^= 1
    engine = make_engine(model)
    file = opened(path, engine, contexts)
    assert [*engine.cache.conversations] == ["grown"] and file.restored == 8
    for name in contexts:
        before = contexts[name]
        reply = say(engine, contexts, name, [5])
        assert reply.usage["cpu"] == (59 if name == "grown" else 0)
        assert_exact(model[1], before + [5], reply.token_ids)


def test_a_deleted_conversation_does_not_live_on_in_the_file(model, path, tmp_path):
    """Its bytes go at once, but for the chunks that a branch shares; those go with the branch. (The process
    is killed afterwards: nothing is written at a stop.)"""
    def sessions():
        opened = Sessions(make_engine(model), history=tmp_path / "history", kv_file=path)
        opened.kv_file.loader.join()
        return opened
    first = sessions()
    base = first.submit(ids(60), "a", max_tokens=4)
    base.result()
    first.submit(ids(9, 1), "branch", base=first.history.head("a"), max_tokens=4).result()
    first.submit(ids(40, 2), "b", max_tokens=4).result()
    first.close()
    content = path.read_bytes()

    def erased(saved):
        """The chunks that are zeros in the file now. All others are what they were."""
        now, found = path.read_bytes(), []
        for number in range(len(saved.chunks)):
            begin = saved.begin + number * saved.chunk_bytes
            here = slice(begin, begin + saved.chunk_bytes)
            if now[here] != content[here]:
                assert now[here] == bytes(saved.chunk_bytes)
                found.append(number)
        return found

    second = sessions()
    saved = second.kv_file.saved
    users = [{saved.conversations[user].name for user in chunk.users} for chunk in saved.chunks]
    assert {"a", "branch"} in users and not erased(saved)
    second.forget("a")
    assert erased(saved) == [number for number, names in enumerate(users) if names == {"a"}]
    second.history.close()                                      # it is killed
    third = sessions()
    assert {*third.engine.cache.conversations} == {"branch", "b"}
    third.forget("branch")
    assert erased(saved) == [number for number, names in enumerate(users) if names != {"b"}]
    third.delete(third.history.head("b"))
    assert len(erased(saved)) == len(users)
    third.history.close()
    fourth = sessions()
    assert fourth.kv_file.restored == 0 and not fourth.engine.cache.conversations
    fourth.close()


def test_a_disk_that_fails_when_we_erase(model, path, monkeypatch, capsys):
    """Then the whole file goes."""
    contexts = write(model, path, dict(a=60, b=60))
    file = opened(path, make_engine(model), contexts)

    def fail(*given):
        raise OSError(5, "Input/output error")
    monkeypatch.setattr(os, "pwrite", fail)
    capsys.readouterr()
    file.erase("a")
    file.erase("b")
    assert not path.exists() and len(lines(capsys)) == 1


def test_what_is_deleted_while_another_server_runs_is_erased_at_the_next_start(model, path, tmp_path):
    for number, file in enumerate([path, None, path]):
        sessions = Sessions(make_engine(model), history=tmp_path / "history", kv_file=file)
        if number == 0:
            sessions.submit(ids(60), "a", max_tokens=4).result()
        elif number == 1:
            sessions.forget("a")
        else:
            sessions.kv_file.loader.join()
            saved = sessions.kv_file.saved
            assert path.read_bytes()[saved.begin:-32] == bytes(8 * saved.chunk_bytes)
        sessions.close()


def test_a_conversation_that_is_deleted_while_it_loads(model, path, monkeypatch):
    """The thread has read its chunks; when the engine takes them over, nobody knows the conversation."""
    contexts = write(model, path, dict(a=90))
    monkeypatch.setattr(SavedKV, "read", lambda self, number, read=SavedKV.read:
                        read(self, number) and (contexts.clear() or bytearray(self.chunk_bytes)))
    engine = make_engine(model)
    assert opened(path, engine, contexts).restored == 0 and not engine.cache.conversations


def test_a_conversation_that_restarts_while_it_loads(model, path):
    """A turn has it, with other tokens already."""
    contexts, engine = write(model, path, dict(a=90)), make_engine(model)
    restarted = {}
    say(engine, restarted, "a", ids(60, 9))
    file = KVFile(path, engine, "history", lambda name: None)
    file.load()
    file.loader.join()
    before = restarted["a"]
    reply = say(engine, restarted, "a", contexts["a"][len(before):80])
    assert file.restored == 0
    assert_exact(model[1], before + contexts["a"][len(before):80], reply.token_ids)


@pytest.mark.parametrize("tenant", ["ada", "bob"])
def test_a_turn_that_waits_while_its_chunks_come_back(model, path, tenant):
    """It shares the system prompt all the same. If it is another tenant's by now, it gets no chunk: the
    chunks' other users are still ada's."""
    contexts, prompt = {}, ids(32)

    def engine():
        made = make_engine(model, max_running=1)
        made.designate(prompt)
        return made
    first = engine()
    file = opened(path, first, contexts)
    for name in "ab":
        say(first, contexts, name, prompt + ids(20) + [ord(name) - 60], tenant="ada")
    stop(file)
    second = engine()
    running = second.submit(ids(20, 8), "c", max_tokens=30, ignore_eos=True)
    second.step()
    waiting = second.submit([5], "a", context=contexts["a"], tenant=tenant, max_tokens=4, ignore_eos=True)
    second.step()
    opened(path, second, contexts)
    reply = waiting.result()                            # with debug=True all books are checked
    assert running.reply and second.cache.conversations["a"].chunks[:4] == second.cache.designated.chunks
    assert (reply.usage["cpu"] > 0) == (tenant == "ada")
    assert_exact(model[1], contexts["a"] + [5], reply.token_ids)


def test_idle_time_goes_on(model, path):
    engine, contexts = make_engine(model), {}
    file = opened(path, engine, contexts)
    for name in "ab":
        say(engine, contexts, name, ids(20))
    engine.cache.conversations["a"].last_active -= 100
    stop(file)
    engine = make_engine(model)
    opened(path, engine, contexts)
    a, b = (engine.clock() - engine.cache.conversations[name].last_active for name in "ab")
    assert 99 < a - b < 101 and 0 < b < 30


def test_users_do_not_come_to_share_by_the_file(model, path):
    """Two of one tenant find each other's beginnings after a restart, as before it; another one does not."""
    engine, contexts, prompt = make_engine(model), {}, ids(40)
    file = opened(path, engine, contexts)
    for name in ("ada1", "ada2", "bob1"):
        say(engine, contexts, name, prompt + ids(20, len(contexts)), tenant=name[:-1])
    shared = [chunk for chunk in engine.cache.conversations["ada2"].chunks if len(chunk.users) > 1]
    assert len(shared) == 5
    stop(file)
    engine = make_engine(model)
    file = opened(path, engine, contexts)
    held = engine.cache.conversations
    for chunk in shared:
        twin = held["ada1"].chunks[chunk.index]
        assert {user.name for user in twin.users} == {"ada1", "ada2"}
    assert file.restored == 9 + 9 + 9 - 5
    for name, cached in dict(ada3=40, bob2=40, eve1=0).items():
        reply = say(engine, contexts, name, prompt + [7], tenant=name[:-1])
        assert reply.usage["cpu"] + reply.usage["gpu"] == cached
        assert_exact(model[1], prompt + [7], reply.token_ids)


def test_the_system_prompt_stays_shared(model, path):
    """Its chunks are not in the file: the first conversation computes them, and all share them as before."""
    prompt, contexts = ids(32), {}
    engine = make_engine(model)
    engine.designate(prompt)
    file = opened(path, engine, contexts)
    for name in "ab":
        say(engine, contexts, name, prompt + ids(20, ord(name)))
    stop(file)
    engine = make_engine(model)
    engine.designate(prompt)
    file = opened(path, engine, contexts)
    assert file.restored == len(file.saved.chunks) == 2 * 4
    for name in "ab":
        before = contexts[name]
        reply = say(engine, contexts, name, [5])
        assert reply.usage["recomputed"] == (32 if name == "a" else 0)
        assert_exact(model[1], before + [5], reply.token_ids)
    assert engine.cache.conversations["b"].chunks[:4] == engine.cache.designated.chunks


def test_what_the_history_does_not_know_is_not_written(checkpoint, path):
    """A client that has nothing stored: its context stays cached, but its words come to no disk."""
    sessions = Sessions(checkpoint, history=path.with_name("history"), kv_file=path, gpu_cache_tokens=1024,
                        cpu_cache_tokens=1024, cost=COST)
    sessions.chat("Tell me of the sea. " * 5, "stored", max_tokens=8)
    sessions.respond([user("Tell me of the sky. " * 5)], hint="session", keep=False, max_tokens=8).result()
    assert any(name.startswith("unstored") for name in sessions.engine.cache.conversations)
    sessions.kv_file.loader.join()
    sessions.close()
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["content"])
    assert [conversation[0] for conversation in content["conversations"]] == ["stored"]


def test_tokens_beyond_the_history_are_not_written(model, path):
    contexts, engine = {}, make_engine(model)
    file = opened(path, engine, contexts)
    say(engine, contexts, "a", ids(60))
    del contexts["a"][30:]
    stop(file)
    assert opened(path, make_engine(model), contexts).restored == 3


def test_a_system_prompt_that_was_none_before(model, path):
    """Its chunks stay its own: what the file has of them is left out."""
    contexts = write(model, path, dict(a=60))
    engine = make_engine(model)
    engine.designate(contexts["a"][:32])
    assert opened(path, engine, contexts).restored == 4
    assert engine.cache.conversations["a"].chunks[:4] == engine.cache.designated.chunks


# ---- a file that cannot be used

def copies(model, tmp_path):
    """The same model in another directory, whose files a test may change."""
    import shutil
    return shutil.copytree(model[0], tmp_path / "model")


@pytest.mark.parametrize("flags", [dict(chunk_size=16), dict(dtype="bfloat16"), dict(dtype="float16")],
                         ids=str)
def test_another_layout(model, path, capsys, flags):
    contexts = write(model, path, dict(a=60))
    capsys.readouterr()
    engine = make_engine(model, **flags)
    file = opened(path, engine, contexts)
    assert len(lines(capsys)) == 1 and file.restored == 0
    assert not path.exists()                    # else what is deleted now would live on in it
    say(engine, contexts, "a", [5])
    stop(file)
    assert opened(path, make_engine(model, **flags), contexts).restored > 0


def test_other_weights_in_files_of_the_same_size_and_date(model, path, tmp_path, capsys):
    contexts = write(model, path, dict(a=60))
    capsys.readouterr()
    directory = copies(model, tmp_path)
    assert opened(path, make_engine([str(directory)]), contexts).restored == 8      # wherever they are
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    engine = make_engine([str(directory)])
    assert opened(path, engine, contexts).restored == 0
    line, = lines(capsys)
    assert line == f"KV file {path}: not used, it is of other weights" and not path.exists()


def test_the_layout_changes_by_itself(model, tmp_path, monkeypatch):
    """With whatever the model's configuration has, and with the program."""
    engine = make_engine(model)
    layouts = {layout_of(engine)}
    network = engine.worker.model
    for change in (dict(rope_theta=5e5), dict(rope_scaling=(8.0, 1.0, 4.0, 64)), dict(norm_eps=1e-4),
                   dict(unrotated=frozenset({1}))):
        monkeypatch.setattr(network, "config", replace(network.config, **change))
        layouts.add(layout_of(engine))
        monkeypatch.undo()
    assert len(layouts) == 5 and layout_of(engine) in layouts
    monkeypatch.setattr(kv_file, "__file__", str(tmp_path / "kv_file.py"))
    (tmp_path / "model.py").write_text("# positions in another order")
    assert layout_of(engine) not in layouts


@pytest.mark.parametrize("trials", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_damage_never_gives_wrong_kv(model, path, trials, capsys):
    """A byte is flipped, a piece is cut off, left out or overwritten, anywhere; half of the time in the
    header. All replies stay what they are."""
    contexts = write(model, path, dict(a=60, b=41))
    whole, rng = path.read_bytes(), random.Random(trials)
    engine, restored = make_engine(model), []

    def replies():
        return [engine.generate([5], name, context=contexts[name], max_tokens=6, ignore_eos=True).token_ids
                for name in contexts]
    expected = replies()
    header = int.from_bytes(whole[:8], "little")
    for trial in range(trials):
        content = bytearray(whole)
        at = rng.randrange(header if trial % 2 else len(whole))
        match trial % 5:
            case 0 | 1:
                content[at] ^= 1 << rng.randrange(8)
            case 2:
                del content[at:]
            case 3:
                del content[at:at + rng.randrange(1, 100)]
            case 4:
                content[at:at + 50] = rng.randbytes(50)
        path.write_bytes(content)
        for name in contexts:
            engine.forget(name)
        capsys.readouterr()
        file = opened(path, engine, contexts)
        restored.append(file.restored)
        assert len(lines(capsys)) == 1 and restored[-1] < 14
        assert replies() == expected
        file.saved and file.saved.file.close()
    assert 0 in restored and 12 in restored


def crafted(content, change):
    """The file with another content in the header, and the right digest of that."""
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    saved = json.loads(header["__metadata__"]["content"])
    header["__metadata__"]["content"] = json.dumps(change(saved) or saved)
    text = json.dumps(header).encode()
    start = len(text).to_bytes(8, "little") + text
    return start + content[size:-32] + hashlib.sha256(start).digest()


@pytest.mark.parametrize("change", [
    lambda saved: ["no", "dict"], lambda saved: saved.pop("chunks") and None,
    lambda saved: saved["chunks"][0].append("one field too many"),
    lambda saved: saved["conversations"][0].__setitem__(0, ["a list as name"]),
    lambda saved: saved["conversations"][0].__setitem__(4, "no hexadecimal"),
    *[lambda saved, field=field, value=value: saved["chunks"][0].__setitem__(field, value)
      for field, value in [(0, -1), (0, 40), (0, 3_000_000), (0, "x"), (1, -1), (1, 0), (1, 9), (2, [7])]]])
def test_a_header_that_no_server_has_written(model, path, capsys, change):
    """One line, and nothing else happens."""
    contexts = write(model, path, dict(a=60))
    path.write_bytes(crafted(path.read_bytes(), change))
    capsys.readouterr()
    engine = make_engine(model)
    file, before = opened(path, engine, contexts), contexts["a"]
    line, = lines(capsys)
    assert "not used" in line and file.restored == 0 and not path.exists()
    assert_exact(model[1], before + [5], say(engine, contexts, "a", [5]).token_ids)
    stop(file)
    assert opened(path, make_engine(model), contexts).restored == 9


def test_fewer_tokens_than_the_file_says():
    tokens = array("i", ids(4))
    for length in (4, 5):
        saved = SavedConversation("a", length, sha256_hex(tokens.tobytes()), 0.0, "")
        assert saved.begins(tokens) == (length == 4)


def test_a_file_of_another_history(model, path, tmp_path, capsys):
    """A server is started with a wrong --history: it takes nothing, erases nothing, and writes nothing."""
    def restored(history):
        sessions = Sessions(make_engine(model), history=tmp_path / history, kv_file=path)
        sessions.kv_file.loader.join()
        sessions.generate(ids(60), "a" + str(sessions.kv_file.restored), max_tokens=4)
        sessions.close()
        return sessions.kv_file.restored
    assert restored("right") == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert restored("wrong") == 0 and path.read_bytes() == before
    assert ["it is no KV file of this history" in line for line in lines(capsys)] == [True, True]
    assert restored("right") == 8


def test_a_file_of_others_is_left_alone(model, path, capsys):
    """It is named by mistake: for example that of the weights."""
    path.write_bytes(b"somebody's work")
    engine = make_engine(model)
    file = opened(path, engine, {})
    stop(file)
    assert path.read_bytes() == b"somebody's work" and os.listdir(path.parent) == [path.name]
    assert [line.split(": ", 1)[1] for line in lines(capsys)] == [
        "not used, it is no KV file of this history: delete it, or name another one",
        "not written, it is no KV file of this history: delete it, or name another one"]


# ---- the stop

def test_a_disk_that_is_full(model, path, capsys, monkeypatch):
    """The file of the last stop stays, whole."""
    contexts = write(model, path, dict(a=60))
    before = path.read_bytes()
    engine = make_engine(model)
    file = opened(path, engine, contexts)
    say(engine, contexts, "a", [5])

    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    stop(file)
    assert lines(capsys) == [f"KV file {path}: not written, [Errno 28] No space left on device"]
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_what_a_killed_stop_leaves_goes_at_the_next_start(model, path):
    """What has the name path.new is somebody else's."""
    engine, other = make_engine(model), path.with_name(path.name + ".new")
    other.write_bytes(b"somebody's new work")
    file = KVFile(path, engine, "history", lambda name: array("i"))
    file.new.write_bytes(b"KV")
    file.load()
    assert os.listdir(path.parent) == [other.name]
    file.loader.join()
    stop(file)
    assert {*os.listdir(path.parent)} == {path.name, other.name}


def test_a_link(model, path, tmp_path):
    """The file that it leads to is replaced, and the link stays."""
    (tmp_path / "disk").mkdir()
    path.symlink_to(tmp_path / "disk" / "kv")
    for _ in range(2):
        contexts = write(model, path, dict(a=60))
        assert path.is_symlink() and os.listdir(tmp_path / "disk") == ["kv"]
    assert opened(path, make_engine(model), contexts).restored == 8


def test_the_file_is_its_owners_alone_and_a_safetensors_file(model, path):
    KVFile(path, make_engine(model), "history", None).new.touch(0o644)  # left by a server that was killed
    write(model, path, dict(a=60))
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with safe_open(path, "pt") as file:
        assert file.get_tensor("kv").shape == (8, 2, 2, 8, 2, 12)
        assert file.get_tensor("kv").dtype == torch.float32 and file.get_tensor("sha256").shape == (32,)
        assert json.loads(file.metadata()["content"])["conversations"][0][0] == "a"


def test_a_stop_while_it_loads_keeps_the_file(model, path, monkeypatch, capsys):
    contexts = write(model, path, dict(a=90, b=60))
    before, begun, go_on = path.read_bytes(), threading.Event(), threading.Event()
    monkeypatch.setattr(SavedKV, "read", lambda self, number, read=SavedKV.read:
                        begun.set() or go_on.wait(30) and read(self, number))
    engine = make_engine(model).start()
    file = KVFile(path, engine, "history", lambda name: array("i", contexts[name]))
    file.load()
    assert begun.wait(30)
    reply = say(engine, {}, "c", ids(20))               # the engine answers meanwhile
    assert len(reply.token_ids) == 6
    engine.close()
    closing = threading.Thread(target=file.close)
    closing.start()
    eventually(lambda: file.stopping)
    go_on.set()
    closing.join()
    assert path.read_bytes() == before and "not written" in lines(capsys)[-1]
    assert file.restored == 0                           # it does not go on for long


def test_after_a_failure_nothing_is_written(model, path, tmp_path, monkeypatch):
    def sessions():
        opened = Sessions(make_engine(model), history=tmp_path / "history", kv_file=path)
        opened.kv_file.loader.join()
        return opened
    first = sessions()
    first.generate(ids(60), "a", max_tokens=4)
    first.close()
    before, second = path.read_bytes(), sessions()
    monkeypatch.setattr(second.engine.worker, "execute", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        second.generate([5], "a")
    second.close()
    assert path.read_bytes() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_in_its_last_step(model, path, tmp_path, monkeypatch):
    """`close` is called while that step is under way."""
    sessions = Sessions(make_engine(model), history=tmp_path / "history", kv_file=path).start()
    sessions.submit(ids(60), "a", max_tokens=4).result()
    begun, go_on = threading.Event(), threading.Event()

    def schedule(now):
        begun.set()
        go_on.wait(30)
        raise AssertionError("the books are wrong")
    monkeypatch.setattr(sessions.engine.scheduler, "schedule", schedule)
    sessions.submit([5], "a", max_tokens=4)
    assert begun.wait(30)
    closing = threading.Thread(target=sessions.close)
    closing.start()
    eventually(lambda: sessions.engine.owner.inbox)
    go_on.set()
    closing.join()
    assert "the books are wrong" in str(sessions.engine.failure) and not path.exists()


def test_a_device_that_fails_at_the_stop(model, path, tmp_path, monkeypatch, capsys):
    """One line, and the history is closed."""
    def fail(chunk):
        raise RuntimeError("CUDA error")
    sessions = Sessions(make_engine(model), history=tmp_path / "history", kv_file=path)
    sessions.generate(ids(60), "a", max_tokens=4)
    sessions.kv_file.loader.join()
    monkeypatch.setattr(sessions.kv_file.pool, "read_chunk", fail)
    capsys.readouterr()
    sessions.close()
    assert lines(capsys) == [f"KV file {path}: not written, CUDA error"] and not path.exists()
    Sessions(make_engine(model), history=tmp_path / "history").close()


def test_a_new_file_that_cannot_be_made(model, path, capsys):
    file = opened(path, make_engine(model), {})
    file.new.mkdir()
    capsys.readouterr()
    stop(file)
    assert len(lines(capsys)) == 1 and os.listdir(path.parent) == [file.new.name]


@pytest.mark.parametrize("change", [
    dict(directory=None), dict(config=SimpleNamespace(stateless=True)), dict(worker=object.__new__(Leader))],
    ids=["random weights", "stateless", "torchrun"])
def test_engines_whose_kv_is_not_kept(path, change):
    engine = dict(directory="model", config=SimpleNamespace(stateless=False), worker=None, cache=None)
    with pytest.raises(ValueError, match="kv_file must be left out with random weights, .*torchrun"):
        KVFile(path, SimpleNamespace(**engine | change), "history", None)


def test_a_file_in_no_directory(model, path, tmp_path):
    """The history is not locked after such an error, and the engine is closed."""
    os.mkfifo(tmp_path / "fifo")
    for wrong in (path / "kv", path.parent, tmp_path / "fifo"):
        with pytest.raises(ValueError, match="kv_file must be a file in a directory that exists"):
            Sessions(model[0], kv_file=wrong, history=tmp_path / "history", gpu_cache_tokens=64,
                     cpu_cache_tokens=64, cost=COST)


# ---- the program

def test_the_flag(checkpoint, path):
    flags = ["--model", str(checkpoint), "--port", "0", "--gpu-cache-tokens", "2048", "--kv-file", str(path)]
    server = open_server(parse_flags([*flags, "--history", str(path.with_name("history"))]))
    server.sessions.kv_file.loader.join()
    server.server_close()
    server.sessions.close()
    assert path.exists()
    with pytest.raises(ValueError, match="left out .* with a history in memory"):
        open_server(parse_flags([*flags, "--history", ":memory:"]))


@pytest.mark.slow
def test_stop_start_and_kill(checkpoint, zygote, tmp_path):
    """SIGTERM writes the file, and the next server has the KV. It is killed: so has the one after it."""
    path, messages = tmp_path / "kv", [user("Tell me of the sea. " * 20)]
    cached, totals = [], []
    for end in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        pid, url = zygote.start(checkpoint, tmp_path / "history", "--kv-file", str(path))

        def on_cpu():
            with urllib.request.urlopen(url + "/cache", timeout=30) as answer:
                return sum(one["chunks"].count("C") for one in json.load(answer)["conversations"])
        if path.exists():
            with safe_open(path, "pt") as file:
                chunks = len(file.get_tensor("kv"))
            eventually(lambda: on_cpu() == chunks)
        with connect(url) as client:
            text, _, usage, _ = ask(client, messages)
        cached.append(usage.prompt_tokens_details.cached_tokens)
        messages += [dict(role="assistant", content=text), user("Go on")]
        totals.append(usage.total_tokens)
        os.kill(pid, end)
        assert zygote.exit_code() == (0 if end == signal.SIGTERM else -end)
    # Of all tokens the last one was sampled, but never fed. Nothing of the second turn was written.
    assert cached == [0, totals[0] - 1, totals[0] - 1]
