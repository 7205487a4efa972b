"""The persistent store: the raw tokens of every turn, a tree in SQLite.

KV-tokens are only a cache; these ids are what dropped ones are recomputed from (the paper's persistent store of raw tokens).
Turns are like commits: each has a parent and holds only what it added, a conversation is a name for its last turn, a branch is
a second name. A turn keeps the ids that the model sampled, since tokenising the visible reply again may give others.

A client that resends its whole history is recognised without a name: a turn stores a rolling hash of all visible messages up
to it. A turn whose ids are not vouched for by its visible text has no hash, and neither has any turn after it.

Invariants: every turn is needed by a conversation or by a later turn; what `commit` returned survives a crash (WAL,
synchronous=FULL); a commit whose parent is not the conversation's last turn changes nothing."""
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from array import array
from typing import Iterable, NamedTuple

SCHEMA_VERSION = 1
SCHEMA = f"""
CREATE TABLE meta (fingerprint TEXT NOT NULL);
CREATE TABLE turn (
    id TEXT PRIMARY KEY,
    parent TEXT REFERENCES turn(id),
    conversation TEXT NOT NULL,     -- in which it was committed
    length INTEGER NOT NULL,        -- tokens from the root up to here
    last_token INTEGER NOT NULL,
    prompt BLOB NOT NULL,           -- int32 ids
    reply BLOB NOT NULL,            -- int32 ids
    messages TEXT NOT NULL,         -- JSON: the new visible messages, then the reply
    hash BLOB,                      -- of all visible messages up to here (NULL: never matched)
    created REAL NOT NULL);
CREATE TABLE conversation (name TEXT PRIMARY KEY, head TEXT NOT NULL REFERENCES turn(id));
CREATE INDEX turn_parent ON turn(parent);
CREATE INDEX turn_hash ON turn(hash);
CREATE INDEX conversation_head ON conversation(head);
PRAGMA user_version = {SCHEMA_VERSION}"""
TURNS = "SELECT id, parent, coalesce(name, conversation), length, last_token FROM turn LEFT JOIN conversation ON head = id"


class Turn(NamedTuple):
    """A stored turn. conversation: one whose head it is, else the one in which it was committed.
    length: tokens from the root up to here; last_token: the last of them, sampled but never fed to the model."""
    id: str
    parent: str | None
    conversation: str
    length: int
    last_token: int


class StaleTurn(LookupError):
    """The turn to build on is gone, or its conversation has gone on without us."""


class History:
    """Any thread may call any method."""

    def __init__(self, path=":memory:", fingerprint: str = "", owner_key: str = ""):
        """fingerprint: the tokenizer's; owner_key: `match` finds only turns committed under the same key.
        ValueError if the file belongs to another tokenizer, another version of this program, or is no history at all."""
        if path != ":memory:":          # private conversations; SQLite gives -wal and -shm the mode of the file
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)
        self._root_hash = digest(b"", owner_key, fingerprint)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._open(path, fingerprint)
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} cannot be used as a history ({error}): name another file") from error

    def _open(self, path, fingerprint: str):
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES (?)", (fingerprint,))
        version, = self._db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: name another file")
        if self._db.execute("SELECT fingerprint FROM meta").fetchone() != (fingerprint,):
            raise ValueError(f"{path} was written with another tokenizer or chat template, so its token ids mean something else "
                             "here: name another file for this model, or delete this one")
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {setting}")

    def head(self, conversation: str) -> Turn | None:
        """The last turn of a conversation; None if there is no such conversation."""
        with self._lock:
            return self._head(conversation)

    def tokens(self, turn_id: str) -> array:
        """The raw ids from the root up to the end of this turn, array('i'). StaleTurn if it is gone."""
        with self._lock:
            return array("i", b"".join(prompt + reply for prompt, reply in self._along_parents(turn_id, "prompt, reply")))

    def messages(self, turn_id: str) -> list[dict]:
        """The visible messages from the root up to the end of this turn. StaleTurn if it is gone."""
        with self._lock:
            return [message for text, in self._along_parents(turn_id, "messages") for message in json.loads(text)]

    def commit(self, conversation: str, parent: str | None, prompt: Iterable[int], reply: Iterable[int],
               messages: Iterable[dict] = (), text: str | None = None, exact: bool = True) -> Turn:
        """Appends a turn to a conversation whose head is `parent` (None: that does not exist yet); durable on return.

        prompt, reply: its ids. messages: its visible messages, {"role", "content"}, before the reply, whose visible text is
        `text` (None: a turn of raw tokens). exact: decoding `reply` gives `text`; where it does not (a stop string was cut
        off), a resent history never matches this turn. StaleTurn if parent is gone or is not the head any more."""
        prompt, reply, visible = array("i", prompt), array("i", reply), list(messages)
        if text is not None:
            visible.append({"role": "assistant", "content": text})
        if not prompt and not reply:
            raise ValueError("a turn needs at least one token")
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            length, parent_hash = self._end_of(conversation, parent)
            vouched = parent_hash and text is not None and exact
            turn = Turn("turn_" + secrets.token_hex(12), parent, conversation,
                        length + len(prompt) + len(reply), (prompt + reply)[-1])
            self._db.execute("INSERT INTO turn VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (
                *turn, prompt, reply, json.dumps(visible), rolled(parent_hash, visible)[-1] if vouched else None, time.time()))
            self._db.execute("INSERT OR REPLACE INTO conversation VALUES (?, ?)", (conversation, turn.id))
        return turn

    def match(self, messages: list[dict], conversation: str | None = None) -> tuple[Turn, int] | None:
        """For a client that resends its history: the turn whose visible messages are the longest proper prefix of `messages`
        that ends with an assistant message, and the length of that prefix. Among equal turns one of the hinted conversation is
        preferred, then the head of any, then the newest."""
        hashes = rolled(self._root_hash, messages)
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant":
                with self._lock:
                    row = self._db.execute(
                        f"{TURNS} WHERE hash = :hash ORDER BY :hint IN (name, conversation) DESC, name = :hint DESC, "
                        "name IS NOT NULL DESC, turn.rowid DESC", {"hash": hashes[count - 1], "hint": conversation}).fetchone()
                if row:
                    return Turn(*row), count
        return None

    def branch(self, turn_id: str, conversation: str) -> Turn:
        """Starts a conversation whose head is an existing turn; nothing is copied. StaleTurn if the turn is gone; ValueError if
        the conversation exists."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._head(conversation):
                raise ValueError(f"conversation {conversation!r} exists already: branch to a new name")
            self._along_parents(turn_id, "id")      # raises if it is gone
            self._db.execute("INSERT INTO conversation VALUES (?, ?)", (conversation, turn_id))
            return self._head(conversation)

    def forget(self, conversation: str):
        """Drops a conversation and its turns that no other conversation or turn needs. An unknown name is no error."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if not (head := self._head(conversation)):
                return
            self._db.execute("DELETE FROM conversation WHERE name = ?", (conversation,))
            for row in reversed(self._along_parents(head.id, "id")):
                needed = self._db.execute("SELECT 1 FROM turn WHERE parent = :id UNION SELECT 1 FROM conversation WHERE head = :id",
                                          {"id": row[0]}).fetchone()
                if needed:
                    break
                self._db.execute("DELETE FROM turn WHERE id = ?", row)

    def conversations(self) -> list[str]:
        """The names of all conversations, sorted."""
        with self._lock:
            return [name for name, in self._db.execute("SELECT name FROM conversation ORDER BY name")]

    def close(self):
        """Closes the file; the history must not be used after."""
        with self._lock:
            self._db.close()

    def _head(self, conversation: str) -> Turn | None:
        row = self._db.execute(f"{TURNS} WHERE name = ?", (conversation,)).fetchone()
        return Turn(*row) if row else None

    def _end_of(self, conversation: str, parent: str | None) -> tuple[int, bytes | None]:
        """Length and hash of a conversation that ends with `parent`."""
        head = self._head(conversation)
        if (head and head.id) != parent:
            raise StaleTurn(f"conversation {conversation!r} does not end with {parent or 'nothing'} any more: "
                            f"{'its last turn is ' + head.id if head else 'it was forgotten'}; read its head and try again")
        if parent is None:
            return 0, self._root_hash
        return self._db.execute("SELECT length, hash FROM turn WHERE id = ?", (parent,)).fetchone()

    def _along_parents(self, turn_id: str, columns: str) -> list[tuple]:
        """These columns of every turn from the root to turn_id."""
        rows = self._db.execute(f"""
            WITH RECURSIVE chain(link, above, depth) AS (
                SELECT id, parent, 0 FROM turn WHERE id = ?
                UNION ALL SELECT id, parent, depth + 1 FROM turn JOIN chain ON id = above)
            SELECT {columns} FROM chain JOIN turn ON id = link ORDER BY depth DESC""", (turn_id,)).fetchall()
        if not rows:
            raise StaleTurn(f"turn {turn_id} is gone")
        return rows


def digest(previous: bytes, *texts: str) -> bytes:
    """sha256 over a digest (or nothing) and texts, written so that their borders count."""
    return hashlib.sha256(previous + json.dumps(texts).encode()).digest()


def rolled(start: bytes, messages: list[dict]) -> list[bytes]:
    """The rolling hash after each message: h_i = sha256(h_{i-1}, role, content)."""
    hashes = [start]
    for message in messages:
        hashes.append(digest(hashes[-1], message["role"], message["content"]))
    return hashes[1:]
