"""The oracle is a model in plain Python, and for crashes a process that is really killed."""
import bisect
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import serving.history
from serving.history import History, StaleTurn

HI, MORE, BYE = ({"role": "user", "content": text} for text in ("Hi", "More", "Bye"))
HELLO, SURE = ({"role": "assistant", "content": text} for text in ("Hello", "Sure"))


@pytest.fixture
def history():
    return History()


def two_turns(history, name="c"):
    first = history.commit(name, None, [1, 2], [3], [HI], "Hello")
    return first, history.commit(name, first.id, [4], [5, 6], [MORE], "Sure")


def branch(history, turn, name):
    """A conversation that ends with this turn, too. It had one more turn, which was deleted."""
    later = history.commit(name, turn.id, [1], [2], branches=True)
    assert history.delete(later.id) == [name]


def stored_turns(path):
    return sqlite3.connect(path).execute("SELECT count(*) FROM turn").fetchone()[0]


def test_commit_and_read_back(history):
    assert history.head("c") is None and history.conversations() == []
    first, second = two_turns(history)
    assert (first.parent, first.conversation, first.length, first.last_token) == (None, "c", 3, 3)
    assert (second.parent, second.conversation, second.length, second.last_token) == (first.id, "c", 6, 6)
    assert history.head("c") == second and history.conversations() == ["c"]
    assert history.tokens(first.id).tolist() == [1, 2, 3]
    assert history.tokens(second.id).tolist() == [1, 2, 3, 4, 5, 6]
    assert history.messages(first.id) == [HI, HELLO]
    assert history.messages(second.id) == [HI, HELLO, MORE, SURE]


def test_token_ids_take_32_bits(history):
    turn = history.commit("c", None, [2 ** 31 - 1], [], [HI], "")
    assert history.tokens(turn.id).tolist() == [2 ** 31 - 1] and turn.last_token == -1  # of no reply
    turn = history.commit("c", turn.id, [], [2 ** 31 - 1], [HI], "")
    assert turn.last_token == 2 ** 31 - 1
    with pytest.raises(ValueError, match="one token"):
        history.commit("d", None, [], [])


def test_raw_tokens_leave_messages_waiting(history):
    history.create("c", {}, [dict(HI, id="msg_1")])
    raw = history.commit("c", None, [1], [2])
    assert history.record("c").waiting == [dict(HI, id="msg_1")]
    history.commit("c", raw.id, [1], [2], [HI], "Hello")
    assert history.record("c").waiting == []


def test_a_refused_second_opening_drops_no_lock(tmp_path):
    """SQLite's locks belong to the process: to close any descriptor of the file would drop them. Then another
    process would take itself for the last user, and remove what we have written."""
    history = History(tmp_path / "h")
    history.commit("c", None, [1], [2])
    with pytest.raises(ValueError, match="another server"):
        History(tmp_path / "h")
    count = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM turn'))"
    for turns in (1, 2):
        seen = subprocess.run([sys.executable, "-c", count, tmp_path / "h"], capture_output=True, text=True)
        assert seen.stdout.strip() == f"({turns},)"
        history.commit("c", history.head("c").id, [1], [2])


def test_items_while_a_turn_is_deleted(tmp_path, monkeypatch):
    history = History(tmp_path / "h")
    _, second = two_turns(history)
    one_by_one = serving.history.items_one_by_one

    def deleted_meanwhile(*arguments):
        history.delete(second.id)
        return one_by_one(*arguments)

    monkeypatch.setattr(serving.history, "items_one_by_one", deleted_meanwhile)
    assert len(history.items("c")) == 4
    monkeypatch.undo()
    assert len(history.items("c")) == 2


def test_long_conversation(history):
    turn = None
    for i in range(1500):
        turn = history.commit("c", turn and turn.id, [i], [-i])
    assert history.tokens(turn.id).tolist() == [x for i in range(1500) for x in (i, -i)]
    assert turn.length == 3000
    history.forget("c")
    assert history.conversations() == []


def test_commit_needs_the_head_as_its_parent(history):
    first, second = two_turns(history)
    for parent in (first.id, None, "turn_never"):
        with pytest.raises(StaleTurn, match=second.id):
            history.commit("c", parent, [7], [8])
    with pytest.raises(StaleTurn, match="forgotten"):
        history.commit("d", second.id, [7], [8])
    history.forget("c")
    with pytest.raises(StaleTurn, match="forgotten"):
        history.commit("c", second.id, [7], [8])
    for read in (history.tokens, history.messages):
        with pytest.raises(StaleTurn, match="gone"):
            read(first.id)
    assert history.conversations() == []


def test_match_takes_the_longest_prefix_that_ends_with_a_reply(history):
    first, second = two_turns(history)
    assert history.match([HI, HELLO, MORE, SURE, BYE]) == (second, 4)
    assert history.match([HI, HELLO, BYE])[0].id == first.id
    assert history.match([HI, HELLO, MORE, SURE])[1] == 2      # at least one message must be new
    assert history.match([HI, HELLO, MORE, {"role": "assistant", "content": "edited"}, BYE])[1] == 2
    other_role = {"role": "system", "content": "Hi"}
    for stranger in ([], [HI], [BYE, HELLO, MORE], [HI, HELLO], [other_role, HELLO, MORE]):
        assert history.match(stranger) is None


def test_borders_between_messages_count(history):
    def chat(*pairs):
        return [{"role": role, "content": content} for role, content in pairs]

    history.commit("c", None, [1], [2], chat(("user", "ab"), ("user", "c")), "Hello")
    assert history.match([*chat(("user", "ab"), ("user", "c")), HELLO, BYE])
    for other in (chat(("user", "a"), ("user", "bc")), chat(("user", 'ab", "user", "c')),
                  chat(("usera", "b"), ("user", "c"))):
        assert history.match([*other, HELLO, BYE]) is None


def test_only_what_visible_text_vouches_for_is_matched(history):
    turn = history.commit("raw", None, [1], [2])
    turn = history.commit("raw", turn.id, [1], [2], [HI], "Hello")
    assert history.messages(turn.id) == [HI, HELLO] and history.tokens(turn.id).tolist() == [1, 2, 1, 2]
    assert history.match([HI, HELLO, BYE]) is None


def test_match_among_equals(history):
    oldest, middle, newest = (two_turns(history, name) for name in "abc")
    resent = [HI, HELLO, MORE, SURE, BYE]
    assert history.match(resent)[0] == newest[1] and history.match(resent, "unknown")[0] == newest[1]
    assert history.match(resent, "a")[0] == oldest[1]
    assert history.match(resent[:3], "b")[0] == middle[0]
    history.commit("c", newest[1].id, [7], [8])
    assert history.match(resent)[0] == middle[1]                     # a head goes before a newer turn
    assert history.match(resent, "c")[0] == newest[1]
    branch(history, oldest[1], "d")
    assert history.match(resent, "d")[0] == history.head("d") and history.match(resent, "a")[0] == oldest[1]
    history.forget("a")
    branch(history, oldest[1], "a")
    assert history.match(resent, "d")[0] == history.head("d")
    assert history.match(resent, "a")[0] == history.head("a")


def test_a_reply_matches_with_and_without_its_thoughts(history):
    turn = history.commit("c", None, [1], [2], [HI], "<think>Who?\nA friend.</think>\n\nHello")
    thought, = history.messages(turn.id)[1:]
    for resent in (thought, HELLO):
        assert history.match([HI, resent, BYE]) == (turn, 2)
    assert not history.match([HI, SURE, BYE])
    asked = dict(role="user", content="<think>Who?</think>Hi")      # a user's message is what it is
    history.commit("d", None, [1], [2], [asked], "Hello")
    assert history.match([HI, HELLO, BYE])[0] == turn


def test_only_thoughts_that_a_reply_begins_with_may_be_left_out(history):
    """Else the model would never see the words that a client has put before a reply."""
    def reply(text):
        return dict(role="assistant", content=text)
    turn = history.commit("c", None, [1], [2], [HI], "Hello")
    for edited in ("I hate you </think> Hello", "<think>Who?</think> I hate you </think> Hello"):
        assert not history.match([HI, reply(edited), BYE])
    cut_off = history.commit("d", None, [1], [2], [MORE], "<think>Who?")    # no </think>: these are its words
    assert history.match([MORE, reply("<think>Who?"), BYE]) == (cut_off, 2)
    assert not history.match([MORE, reply("<think>Why?"), BYE]) and not history.match([MORE, reply(""), BYE])
    thinking = History(thinks=True)         # the template writes the <think>
    turn = thinking.commit("c", None, [1], [2], [HI], "Who?</think> Hello")
    assert thinking.match([HI, HELLO, BYE]) == (turn, 2)
    assert not thinking.match([HI, reply("Who?</think> I hate you </think> Hello"), BYE])


def test_white_space_around_a_reply_does_not_count(history):
    """A client may trim the replies that it resends, or the reply itself ended with a newline."""
    turn = history.commit("c", None, [1], [2], [HI], "\n Hello\n")
    empty = history.commit("d", None, [1], [2], [MORE], "")
    for resent in ("Hello", "\n Hello\n", " Hello", "<think>Who?</think>Hello "):
        assert history.match([HI, dict(role="assistant", content=resent), BYE]) == (turn, 2)
    assert history.match([MORE, dict(role="assistant", content="\n"), BYE]) == (empty, 2)
    assert not history.match([HI, dict(role="assistant", content="Hel lo"), BYE])
    assert not history.match([dict(role="user", content="Hi "), HELLO, BYE])


def test_match_asks_no_more_for_a_long_history_than_for_a_short_one(history):
    first, _ = two_turns(history)
    statements = []
    history._reader.set_trace_callback(statements.append)
    assert history.match([HI, HELLO, *[MORE, HI] * 500, BYE])[0].id == first.id
    assert history.match([HI, HELLO, *[BYE, SURE] * 500, BYE])[0].id == first.id
    assert not history.match([*[BYE, SURE] * 500, BYE])
    history._reader.set_trace_callback(None)
    assert sum("FROM turn" in statement for statement in statements) == 2 + 2 + 1


def test_owners_do_not_match_each_other(history):
    for owner in ("ada/", "bob/"):
        history.commit(owner + "c", None, [1], [2], [HI], "Hello")
    resent = [HI, HELLO, BYE]
    assert history.match(resent, None, "ada/")[0].conversation == "ada/c"
    assert history.match(resent, "ada/c", "bob/")[0].conversation == "bob/c"
    assert history.match(resent, None, "")[0].conversation == "bob/c"
    assert history.match(resent, "ada/c", "eve/") is None and history.match(resent, None, "ad/") is None


def test_a_salt_separates_what_is_matched(history):
    first = history.commit("c", None, [1], [2], [HI], "Hello", salt="x")
    second = history.commit("c", first.id, [1], [2], [MORE], "Sure")        # the context begins with it
    other = history.commit("d", None, [1], [2], [HI], "Hello")
    for salt, turn in dict(x=first, y=None).items():
        assert history.match([HI, HELLO, BYE], salt=salt) == (turn and (turn, 2))
    assert history.match([HI, HELLO, BYE]) == (other, 2)
    assert history.match([HI, HELLO, MORE, SURE, BYE], salt="x") == (second, 4)
    anew = history.commit("c", second.id, [1], [2], [HI], "Hello", carried=0, salt="y")
    assert history.match([HI, HELLO, BYE], salt="y") == (anew, 2)


def test_branch_shares_and_forget_keeps_what_is_shared(tmp_path):
    history = History(tmp_path / "h")
    first, second = two_turns(history, "main")
    branch(history, first, "side")
    assert history.head("side") == first._replace(conversation="side")
    assert stored_turns(tmp_path / "h") == 2
    third = history.commit("side", first.id, [9], [9])
    assert history.tokens(third.id).tolist() == [1, 2, 3, 9, 9]
    with pytest.raises(StaleTurn, match="side"):
        history.commit("side", second.id, [9], [9], branches=True)
    history.forget("main")
    assert history.tokens(third.id).tolist() == [1, 2, 3, 9, 9] and stored_turns(tmp_path / "h") == 2
    with pytest.raises(StaleTurn):
        history.commit("late", second.id, [9], [9], branches=True)
    assert history.conversations() == ["side"]
    history.forget("side")
    history.forget("side")
    assert stored_turns(tmp_path / "h") == 0 and history.conversations() == []


ACTIONS = st.tuples(st.sampled_from(["commit", "commit", "anew", "branch", "forget", "delete"]),
                    st.sampled_from("abcd"), st.sampled_from("abcd"), st.integers(0, 3))


def without_deleted_ends(model, deleted):
    """A conversation ends with a turn that is not deleted; if there is none, it goes."""
    shorter = {name: turns[:-1] if turns[-1] in deleted else turns for name, turns in model.items()}
    shorter = {name: turns for name, turns in shorter.items() if turns}
    return model if shorter == model else without_deleted_ends(shorter, deleted)


@settings(deadline=None, max_examples=100)
@given(st.lists(ACTIONS, max_size=30))
def test_against_lists_of_turns(actions):
    """The model: a conversation is a list of turns; a turn is (id, number, True if it starts anew)."""
    history, model, deleted = History(), {}, set()
    for i, (action, name, other, depth) in enumerate(actions):
        turns = model.get(name, [])
        if action in ("commit", "anew"):
            turn = history.commit(name, turns[-1][0] if turns else None, [i], [-i],
                                  [{"role": "user", "content": str(i)}], str(-i),
                                  carried=0 if action == "anew" else None)
            model[name] = turns + [(turn.id, i, action == "anew")]
        elif action == "branch" and other in model and name not in model:
            turn = history.commit(name, model[other][-1][0], [i], [-i],
                                  [{"role": "user", "content": str(i)}], str(-i), branches=True)
            model[name] = model[other] + [(turn.id, i, False)]
        elif action == "forget":
            history.forget(name)
            model.pop(name, None)
        elif action == "delete" and depth < len(turns):
            deleted.add(turns[-1 - depth])
            history.delete(turns[-1 - depth][0])
        model = without_deleted_ends(model, deleted)
        assert history.conversations() == sorted(model)
        for name, turns in model.items():
            start = max([k for k, (_, _, anew) in enumerate(turns) if anew], default=0)
            assert history.head(name).id == turns[-1][0]
            tokens = [token for _, number, _ in turns[start:] for token in (number, -number)]
            assert history.tokens(turns[-1][0]).tolist() == tokens
            visible = [str(sign * turn[1]) for turn in turns if turn not in deleted for sign in (1, -1)]
            assert [item["content"] for item in history.items(name)] == visible
            assert all((history.turn(turn[0]) is None) == (turn in deleted) for turn in turns)
    for name in "abcd":
        history.forget(name)
    assert history._db.execute("SELECT count(*) FROM turn").fetchone() == (0,)


def test_a_context_of_its_own(history):
    """Other instructions: the turn carries the older messages. They are matched, but listed only once."""
    first = history.commit("c", None, [1, 2], [3], [HI], "Hello")
    system = {"role": "system", "content": "Be brief."}
    second = history.commit("c", first.id, [7, 8], [9], [system, HI, HELLO, MORE], "Sure", carried=3)
    assert (second.parent, second.length) == (first.id, 3) and history.tokens(second.id).tolist() == [7, 8, 9]
    assert history.messages(second.id) == [system, HI, HELLO, MORE, SURE]
    assert history.match([system, HI, HELLO, MORE, SURE, BYE]) == (second, 5)
    items = history.items("c")
    assert [item["content"] for item in items] == ["Hi", "Hello", "More", "Sure"]
    assert len({item["id"] for item in items}) == 4
    third = history.commit("c", second.id, [4], [5], [BYE], "Bye")
    assert history.tokens(third.id).tolist() == [7, 8, 9, 4, 5] and third.length == 5
    assert history.items("c")[:4] == items and items[3]["id"] == f"msg_{second.id}"


def test_a_conversation_that_was_asked_for(history):
    history.create("c", {"a": "b"}, [dict(HI, id="msg_1")])
    assert history.head("c") is None and history.record("c").metadata == {"a": "b"}
    assert history.items("c") == [dict(HI, id="msg_1")]
    turn = history.commit("c", None, [1], [2], [dict(HI, id="msg_1"), MORE], "Hello", note={"n": 1})
    assert history.items("c")[0] == dict(HI, id="msg_1") and history.record("c").waiting == []
    assert turn.note == '{"n": 1}'
    history.update("c", {}, [dict(BYE, id="msg_2")])
    assert [item["content"] for item in history.items("c")] == ["Hi", "More", "Hello", "Bye"]
    assert history.delete(turn.id) == ["c"] and history.head("c") is None
    assert history.items("c") == [dict(BYE, id="msg_2")] and history.conversations() == ["c"]
    with pytest.raises(ValueError, match="exists"):
        history.create("c", {})


def test_what_is_oldest_and_what_it_takes(tmp_path):
    history, day = History(tmp_path / "h"), 86400
    for name in "abc":
        two_turns(history, name)
    def aged(name, days):
        history._db.execute("UPDATE conversation SET active = active - ? WHERE name = ?", (days * day, name))
    aged("b", 3), aged("c", 2)
    now, plenty = history.record("a").active, 2**30
    assert history.oldest(now - 4 * day, plenty) is None
    assert history.oldest(now - 2.5 * day, plenty) == "b" == history.oldest(0, 1000)
    history.forget("b")
    assert history.oldest(now - 2.5 * day, plenty) is None and history.oldest(now - 1.5 * day, plenty) == "c"
    head = history.head("c")
    history.commit("c", head.id, [1], [2])
    assert history.oldest(now - 1.5 * day, plenty) is None and History().oldest(now, 0) is None
    for n in range(200):
        history.commit("big", history.head("big") and history.head("big").id, [n] * 5000, [n])
    assert history.oldest(0, 2**20) == "a"
    for name in "ac":
        history.forget(name)
    assert history.oldest(0, 2**20) == "big"
    history.forget("big")
    assert history.oldest(0, 2**20) is None                  # free pages do not count: they are used again


def test_restart(tmp_path):
    history = History(tmp_path / "h", "model one")
    _, second = two_turns(history)
    history.close()
    again = History(tmp_path / "h", "model one")
    assert again.head("c") == second and again.match([HI, HELLO, MORE, SURE, BYE]) == (second, 4)


def test_files_it_refuses(tmp_path):
    History(tmp_path / "h", "model one").close()
    with pytest.raises(ValueError, match=r"/h was written with another tokenizer .* name another file"):
        History(tmp_path / "h", "model two")
    sqlite3.connect(tmp_path / "h").execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="/h has schema version 99"):
        History(tmp_path / "h", "model one")
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE cats (name)")
    with pytest.raises(ValueError, match="version 0"):
        History(tmp_path / "other")
    (tmp_path / "letter").write_text("Dear Ada, " * 1000)
    with pytest.raises(ValueError, match="/letter cannot be used as a history"):
        History(tmp_path / "letter")
    assert (tmp_path / "letter").read_text().startswith("Dear Ada")


def test_only_the_owner_can_read_the_files(tmp_path):
    previous = os.umask(0)
    try:
        history = History(tmp_path / "h")
        two_turns(history)
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["h", "h-shm", "h-wal"]
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
        history.close()
        os.chmod(tmp_path / "h", 0o644)         # as a careless copy would be
        again = History(tmp_path / "h")
        two_turns(again, "d")
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())
    finally:
        os.umask(previous)


def test_concurrent_commits(tmp_path):
    """Eight threads append to three conversations, reading the head anew whenever another was faster."""
    history = History(tmp_path / "h")

    def append(i):
        name = "abc"[i % 3]
        for n in range(15):
            while True:
                head = history.head(name)
                try:
                    history.commit(name, head and head.id, [i], [n])
                    break
                except StaleTurn:
                    pass

    threads = [threading.Thread(target=append, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = [history.tokens(history.head(name).id).tolist() for name in "abc"]
    pairs = [list(zip(row[::2], row[1::2])) for row in tokens]
    assert sorted(pair for row in pairs for pair in row) == [(i, n) for i in range(8) for n in range(15)]
    for row in pairs:
        for i in {i for i, _ in row}:
            assert [n for thread, n in row if thread == i] == list(range(15))


def test_kill_loses_nothing_acknowledged(tmp_path):
    program = """
import sys; from serving.history import History
history, turn = History(sys.argv[1]), None
for i in range(1_000_000):
    turn = history.commit("c", turn and turn.id, [i], [i], [{"role": "user", "content": str(i)}], "ok")
    print(i, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path / "h"], stdout=subprocess.PIPE,
                             text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)})
    for _ in range(40):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    acknowledged = 40 + len([line for line in child.stdout.read().split("\n") if line])
    child.wait()
    history = History(tmp_path / "h")
    tokens = history.tokens(history.head("c").id).tolist()
    assert len(tokens) // 2 in (acknowledged, acknowledged + 1)
    assert tokens == [i for i in range(len(tokens) // 2) for _ in range(2)]
    assert history.head("c").length == len(tokens)
    assert len(history.messages(history.head("c").id)) == len(tokens)


def test_needs_no_torch():
    program = "import sys, serving.history; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, check=True)


# ---- the file

def test_a_file_of_somebody_else_stays_as_it_was(tmp_path):
    """Neither its mode nor its bytes change, and nothing appears beside it."""
    cats = sqlite3.connect(tmp_path / "cats")
    cats.execute("PRAGMA journal_mode = WAL")
    cats.execute("CREATE TABLE cats (name)")
    cats.close()
    (tmp_path / "letter").write_text("Dear Ada, " * 1000)
    History(tmp_path / "other model", "two").close()
    for file in list(tmp_path.iterdir()):
        file.chmod(0o644)
        before = file.read_bytes()
        with pytest.raises(ValueError, match="name another file"):
            History(file, "one")
        assert (file.stat().st_mode & 0o777, file.read_bytes()) == (0o644, before)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", tmp_path):
        with pytest.raises((ValueError, OSError), match="name a regular file|directory"):
            History(path)


def test_one_server_at_a_time(tmp_path):
    """Until it closes the file, or is killed."""
    program = "import sys, time; from serving.history import History; h = History(sys.argv[1]); " \
              "print('open', flush=True); time.sleep(60)"
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "h"], cwd=root, text=True,
                          stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match="another server uses"):
            History(tmp_path / "h")
        child.kill()
        child.wait()
    history = History(tmp_path / "h")
    with pytest.raises(ValueError, match="another server uses"):
        History(tmp_path / "h")
    history.close()
    History(tmp_path / "h").close()


def test_ids_beyond_the_vocabulary(tmp_path):
    history = History(tmp_path / "h")
    two_turns(history)
    history.close()
    History(tmp_path / "h", vocab_size=7).close()
    with pytest.raises(ValueError, match="beyond the vocabulary of 6"):
        History(tmp_path / "h", vocab_size=6)
    for damage in ("x'ffffffff'", "x'0102'", "'text'"):
        db = sqlite3.connect(tmp_path / "h")
        with db:
            db.execute(f"UPDATE turn SET reply = {damage}")
        db.close()
        with pytest.raises(ValueError, match="vocabulary|damaged"):
            History(tmp_path / "h")


def test_who_writes_elsewhere_stops_only_writers(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.history.BUSY_SECONDS", 0.5)
    history = History(tmp_path / "h")
    first, second = two_turns(history)
    other = sqlite3.connect(tmp_path / "h", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    failures = []

    def write():
        try:
            history.commit("c", second.id, [1], [2])
        except sqlite3.OperationalError as error:
            failures.append(error)
    writing = threading.Thread(target=write)
    writing.start()
    reads = 0
    while writing.is_alive():
        assert history.head("c") == second and history.tokens(first.id).tolist() == [1, 2, 3]
        reads += 1
    assert failures and reads > 100
    other.execute("ROLLBACK")
    third = history.commit("c", second.id, [1], [2])
    assert history.head("c") == third


SYNC_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int fdatasync(int file) {
    write(1, "sync\\n", 5);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
int fsync(int file) {
    write(1, "sync\\n", 5);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
"""


def test_a_commit_has_reached_the_disk(tmp_path):
    """We see each call of fsync: one at least happens between the beginning of a commit and its end. Without
    it a turn that was told to be done would survive a crash of the process, but not one of the machine."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    (tmp_path / "shim.c").write_text(SYNC_SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"],
                   check=True)
    program = """
import sys; from serving.history import History
history, turn = History(sys.argv[1]), None
for i in range(5):
    print("begin", flush=True)
    turn = history.commit("c", turn and turn.id, [i], [i])
    print("end", flush=True)
"""
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "shim.so")}
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "h"], env=environment, check=True,
                         cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    commits = run.stdout.split("begin\n")[1:]
    assert len(commits) == 5 and all(commit.startswith("sync\n") and "end\n" in commit for commit in commits)


# ---- how much an owner stores

def test_every_owner_has_a_share_of_its_own(tmp_path):
    """Counted when it is written, and again when the file is opened."""
    history = History(tmp_path / "h")
    for owner in ("ada/", "bob/"):
        for name in ("x", "y"):
            history.commit(owner + name, None, [1] * 1000, [2], [HI], "Hello")
    history.commit("eve/x", None, [1], [2], note=dict(user="x" * 20_000))
    history.create("ada/z", {}, [dict(role="user", content="x" * 5000)])

    def stored(owner):
        """By halving: the smallest limit that no conversation exceeds."""
        return bisect.bisect(range(100_000), False, key=lambda n: history.oldest(0, n, owner) is None)
    sizes = {owner: stored(owner) for owner in ("ada/", "bob/", "eve/", "nobody/")}
    assert 8_000 < sizes["bob/"] < 12_000 and 5_000 < sizes["ada/"] - sizes["bob/"] < 7_000
    assert 20_000 < sizes["eve/"] < 22_000
    assert sizes["nobody/"] == 0 and history.oldest(0, 0, "nobody/") is None
    assert history.oldest(0, sizes["bob/"] - 1, "bob/") == "bob/x"
    assert history.oldest(0, 0, "bob/", spared=["bob/x"]) == "bob/y"
    history.close()
    history = History(tmp_path / "h")
    assert {owner: stored(owner) for owner in sizes} == sizes
    history._db.execute("UPDATE conversation SET waiting = '[]' WHERE name = 'ada/z'")
    history.forget("bob/x")
    history.commit("ada/x", history.head("ada/x").id, [1], [2])
    assert sizes["ada/"] - 5_100 < stored("ada/") < sizes["ada/"] - 4_000
    assert stored("bob/") == sizes["bob/"] // 2
    for name in history.conversations():
        history.forget(name)
    assert [stored(owner) for owner in sizes] == [0, 0, 0, 0]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_gone(tmp_path, replaced):
    """Nobody is told that a turn is stored which no later start would find."""
    history = History(tmp_path / "h")
    turn = history.commit("c", None, [1], [2])
    (tmp_path / "h").rename(tmp_path / "elsewhere")
    if replaced:
        History(tmp_path / "h").close()
    with pytest.raises(OSError, match="has replaced|No such file"):
        history.commit("c", turn.id, [1], [2])
    history.close()


def test_a_backup_while_a_server_runs(tmp_path, monkeypatch):
    """The command of deploy/README.md."""
    readme = (Path(__file__).parent.parent / "deploy" / "README.md").read_text()
    command, = re.findall(r"(?m)^umask 077; python -c .*VACUUM INTO.*$", readme)
    history = History(tmp_path / "s1.sqlite", "a tokenizer")
    turn = history.commit("c", None, [1], [2], [HI], "Hello")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, cwd=tmp_path)
    history.commit("c", turn.id, [3], [4], [MORE], "Sure")
    backup = History(tmp_path / "backup.sqlite", "a tokenizer")
    assert backup.head("c") == turn
    assert backup.messages(turn.id) == [HI, dict(role="assistant", content="Hello")]
    assert (tmp_path / "backup.sqlite").stat().st_mode & 0o77 == 0
    backup.close(), history.close()


@pytest.mark.parametrize("owner", ["", "ada/"])
def test_many_chats_that_begin_alike_hold_nobody_up(owner):
    """Both look-ups read as many rows among 2,000 of them as among 200, whoever owns the others."""
    looks = []
    for count in (200, 2000):
        history = History()
        for n in range(count):
            history.commit(f"eve/{n}" if owner else str(n), None, [1], [2], [HI], "Hello")
        own = history.commit(f"{owner}own", None, [1], [2], [HI], "Hello")
        for n in range(150):
            history.commit(f"{owner}{n}b", None, [1], [2], [HI], "Hello")
        steps = []
        history._db.set_progress_handler(lambda: steps.append(1), 10)
        said = [HI, dict(role="assistant", content="Hello"), MORE]
        assert history.match(said, prefix=owner)[0].conversation == f"{owner}149b"
        assert history.match(said, hint=f"{owner}own", prefix=owner)[0].id == own.id
        assert history.oldest(0, float("inf"), owner) is None
        oldest = history.oldest(0, 0, owner)
        assert oldest == (f"{owner}own" if owner else "0")
        history._db.set_progress_handler(None, 0)
        looks.append(len(steps))
    assert looks[1] < 1.5 * looks[0], looks


def test_pages_of_a_long_conversation():
    """Pages forward and backward give what one page gives."""
    history, turn = History(), None
    for n in range(30):
        messages = [{"role": "user", "content": f"{n} {part}"} for part in range(n % 3)]
        turn = history.commit("c", turn and turn.id, [n], [n], messages, str(n))
    history.update("c", new=[dict(MORE, id="msg_w1"), dict(BYE, id="msg_w2")])
    whole = history.items("c")
    assert len(whole) == 30 + 30 + 2
    for newest_first in (False, True):
        for limit in (1, 2, 7, 100):
            items = []          # a page begins with the last item of the one before
            while len(page := history.items("c", items[-1]["id"] if items else None, newest_first,
                                            limit + 1)) > bool(items):
                assert len(page) <= limit + 1
                items += page[bool(items):]
            assert items == (whole[::-1] if newest_first else whole)
    assert history.items("c", "msg_unknown") == [] == history.items("nobody", limit=3)


def test_a_page_reads_its_own_turns_alone():
    """Of a conversation of 300 turns. A page of 4 items has 2 turns, or 3 without the last reply."""
    history, turn, queries = History(), None, []
    for n in range(300):
        turn = history.commit("c", turn and turn.id, [n], [n], [HI], str(n))
    whole = history.items("c")
    history._reader.set_trace_callback(queries.append)
    for read, items in ((history.items, whole), (history.input_items, whole[:-1])):
        for newest_first in (False, True):
            for start in (0, 200, 500):
                ordered = items[::-1] if newest_first else items
                queries.clear()
                page = read("c" if read == history.items else turn.id, ordered[start]["id"], newest_first, 4)
                assert page == ordered[start:start + 4] and len(queries) < 10
    queries.clear()
    assert history.item("c", whole[7]["id"]) == whole[7] and len(queries) < 10
    assert history.item("c", "msg_unknown") is None is history.item("nobody", whole[7]["id"])
