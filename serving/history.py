r"""The persistent store: the raw tokens of every turn, a tree in SQLite.

KV-tokens are only a cache. When a chunk was dropped, its tokens are read from here and computed
again (the paper's persistent store of raw tokens, §4.3).

Turns are like commits in git. A turn has a parent and holds only the tokens that it added. A
conversation is a name for its last turn, its *head*. A branch is a second name.

    turn 1 ---- turn 2 ---- turn 3      <- conversation "main"
                      \
                       ---- turn 4      <- conversation "side", a branch after turn 2

A turn keeps the ids that the model sampled, because one text can be tokenised in several ways. A
turn may also restart: then the model reads its tokens after an empty context instead of its
parent's (other instructions, or older messages left out).

A client that resends all its messages needs no name. Each turn stores a hash of the visible
messages of its context (those that the chat template shows to the model), and `match` looks for
that hash. If a turn's visible text does not determine its ids, then it has no hash, and neither has
any later turn of that context.

A conversation's name begins with its owner's prefix, so owners need no column. A prefix has one
"/", at its end, where OWNER cuts a name: "3f9a/my chat" belongs to the owner "3f9a/". A
server without API keys has one owner, "".

Invariants: every stored turn is needed by a conversation or by a later turn. A turn that `commit`
returned survives a crash (WAL, synchronous=FULL). A commit that fails changes nothing; it fails if
the conversation does not end where its caller thinks.
"""
import fcntl
import hashlib
import json
import os
import secrets
import sqlite3
import stat
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import dropwhile, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving import tools

SCHEMA_VERSION = 2
BUSY_SECONDS = 5        # a write waits so long while another process writes to the file
SCHEMA = f"""
CREATE TABLE meta (fingerprint TEXT NOT NULL);
CREATE TABLE turn (
    id TEXT PRIMARY KEY,
    parent TEXT REFERENCES turn(id),
    conversation TEXT NOT NULL,     -- in which it was committed
    length INTEGER NOT NULL,        -- tokens of its context, including its own
    last_token INTEGER NOT NULL,    -- of its reply; -1 if the reply has none
    prompt BLOB NOT NULL,           -- int32 ids
    reply BLOB NOT NULL,            -- int32 ids
    messages TEXT NOT NULL,         -- JSON: `carried` old visible messages, the new ones, the reply
    carried INTEGER,                -- NULL: continues its parent's context. A number: see History.commit
    note TEXT NOT NULL,             -- JSON: whatever its caller wants to read again later
    hidden INTEGER NOT NULL DEFAULT 0,      -- its client deleted it, but later turns need it
    hash BLOB,                      -- of the visible messages of its context (NULL: never matched)
    created REAL NOT NULL);
CREATE TABLE conversation (
    name TEXT PRIMARY KEY,
    head TEXT REFERENCES turn(id),  -- NULL: no turn yet
    metadata TEXT,                  -- JSON (NULL: no client created or edited it; a turn made it)
    waiting TEXT NOT NULL,          -- JSON: visible messages that its next turn begins with
    created REAL NOT NULL,
    active REAL NOT NULL);
PRAGMA user_version = {SCHEMA_VERSION}"""
OWNER = "substr({0}, 1, instr({0}, '/'))"      # SQL: the owner's prefix of a conversation's name
INDEXES = dict(turn_parent="turn(parent)", turn_hash="turn(hash)",
               conversation_head="conversation(head)", conversation_active="conversation(active)",
               turn_of_owner=f"turn(hash, {OWNER.format('conversation')})",
               conversation_of_owner=f"conversation({OWNER.format('name')}, active)")
HASH_BYTES = 32         # of sha256
MOST_ALIKE = 100        # turns of the same text that `match` chooses from, the newest ones
# The columns are the fields of Turn.
TURNS = ("SELECT id, parent, coalesce(name, conversation), length, last_token, note, hash, "
         "turn.created FROM turn LEFT JOIN conversation ON head = id")
# SQL for the turn before a turn. `chain` follows one of them back to its end.
CONTEXT = "CASE WHEN carried IS NULL THEN parent END"       # as far as the model reads
ANCESTRY = "parent"                                         # as far as the conversation goes


class Turn(NamedTuple):
    """A stored turn."""
    id: str
    parent: str | None
    conversation: str    # one whose head it is; if there is none, the one in which it was committed
    length: int             # tokens of its context, including its own
    last_token: int         # of its reply; -1 if the reply has none
    note: str               # JSON: the note that `commit` was given
    hash: bytes | None      # of the visible messages of its context; None: never matched
    created: float          # seconds since 1970


class ConversationRecord(NamedTuple):
    """A stored conversation."""
    name: str
    head: str | None        # None: no turn yet
    metadata: dict | None   # None: no client created or edited it, it came with its first turn
    waiting: list[dict]     # visible messages that its next turn begins with
    created: float          # seconds since 1970
    active: float           # seconds since 1970


class StaleTurn(LookupError):
    """The turn to build on is gone, or another turn was committed after it."""


class History:
    """Any thread may call any method."""

    def __init__(self, path: str | os.PathLike = ":memory:", fingerprint: str = "",
                 vocab_size: int = 2**31, thinks: bool = False):
        """fingerprint: the tokenizer's. vocab_size: the model's; all token ids are below it. thinks:
        the chat template writes the "<think>" that a reply begins with, see tools.Form.

        ValueError if the file belongs to another tokenizer, to another version of this program, or
        to a server that is running, or if it is not a history. Then the file stays as it was."""
        self._root_hash, self._thinks = digest(b"", fingerprint), thinks
        self._open = ExitStack()        # closes all that we open, in reverse order
        self.path = path
        self._file: int | None = None   # the descriptor, unless the history is in memory
        try:
            if path != ":memory:":
                self._take_file(path, fingerprint)
            self._connect(path, fingerprint)
            check(self._reader, path, fingerprint)
            check_ids(self._reader, path, vocab_size)
        except BaseException as error:
            self._open.close()
            if isinstance(error, (sqlite3.DatabaseError, UnicodeError)):
                reason = f"{path} cannot be used as a history ({error}): name another file"
                raise ValueError(reason) from error
            raise

    def _take_file(self, path: str | os.PathLike, fingerprint: str):
        """Lock the file, check that it is a history of ours, and then make it private."""
        file = self._file = open_alone(path)
        self._open.callback(os.close, file)
        if os.fstat(file).st_size:
            with closing(untouched(path)) as db:
                check(db, path, fingerprint)
        os.fchmod(file, 0o600)          # SQLite gives the -wal and -shm files the mode of this one

    def _connect(self, path: str | os.PathLike, fingerprint: str):
        """One connection writes, the other one reads, and each has a lock of its own. So reading
        does not wait for a write (but `oldest` does). A history in memory has one connection and
        one lock for both: `close` takes that lock twice, hence an RLock."""
        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._open.callback(connection.close)
            return connection
        self._db, self._write_lock = connect(), threading.RLock()
        with self._writing() as db:
            create_tables(db, fingerprint)
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON",
                        "busy_timeout = 20"):
            self._db.execute(f"PRAGMA {setting}")
        count_bytes(self._db)
        self._reader, self._read_lock = self._db, self._write_lock
        if path != ":memory:":
            self._reader, self._read_lock = connect(), threading.RLock()
            self._reader.execute("PRAGMA query_only = ON")

    # ---- turns

    def head(self, conversation: str) -> Turn | None:
        """The last turn of a conversation. None if it has no turn, or does not exist."""
        with self._reading() as db:
            return head_of(db, conversation)

    def turn(self, turn_id: str) -> Turn | None:
        """None if it is gone, or if its client deleted it."""
        with self._reading() as db:
            return find_turn(db, "id = :id AND NOT hidden", id=turn_id)

    def tokens(self, turn_id: str) -> array:
        """The raw ids of a turn's context, its own included, as array("i"). StaleTurn if it is
        gone."""
        with self._reading() as db:
            rows = chain(db, CONTEXT, turn_id, "prompt, reply")
        return array("i", b"".join(prompt + reply for prompt, reply in rows))

    def messages(self, turn_id: str) -> list[dict]:
        """The visible messages of a turn's context, its own included. StaleTurn if it is gone."""
        with self._reading() as db:
            rows = chain(db, CONTEXT, turn_id, "messages")
        return [message for text, in rows for message in json.loads(text)]

    def commit(self, conversation: str, parent: str | None, prompt: Iterable[int],
               reply: Iterable[int], messages: Iterable[dict] = (), text: str | None = None,
               calls: Sequence[dict] = (), carried: int | None = None, note: dict | None = None,
               id: str | None = None, branches: bool = False, salt: str = "") -> Turn:
        """Append a turn to a conversation. It is on disk when this returns.

        parent, branches: what the turn follows:

                parent=head                     the conversation goes on from its head
                parent=None                     the conversation has no turn yet
                parent=any, branches=True       it has no turn yet, and branches off after any turn

        prompt, reply: the turn's token ids.
        messages: the visible messages before the reply, each {"role", "content"}.
        text: the visible text of the reply. None: a turn of raw tokens, which has no text; messages
            that wait for the conversation's next turn go on waiting.
        calls: those that the reply has beside its text, see tools.py.
        carried: None continues the context of the parent. A number restarts from an empty one; so
            many of `messages`, the first ones, are not new: instructions, and messages of earlier
            turns:

                carried=3   [instructions, "Hi", "Hello", "More"]   only "More" is new in this turn

        salt: only a `match` with this salt finds a context that begins with this turn.

        StaleTurn if the parent is gone, or is not the head any more."""
        prompt, reply, shown = array("i", prompt), array("i", reply), list(messages)
        if text is not None:
            called = dict(tool_calls=list(calls)) if calls else {}
            shown.append({"role": "assistant", "content": text} | called)
        if not prompt and not reply:
            raise ValueError("a turn needs at least one token")
        with self._writing() as db:
            expect_head(db, conversation, None if branches else parent)
            before = find_turn(db, "id = :id AND NOT hidden", id=parent)
            if parent and before is None:
                raise StaleTurn(f"turn {parent} is gone")
            length, hashed = (before.length, before.hash) if before else (0, self._root(salt))
            if carried is not None:
                length, hashed = 0, self._root(salt)
            determined = hashed and text is not None
            hashed = rolled(hashed, shown, self._thinks)[-1] if determined else None
            turn = Turn(id or new_id(), parent, conversation, length + len(prompt) + len(reply),
                        reply[-1] if reply else -1, json.dumps(note or {}), hashed, time.time())
            db.execute("""
                INSERT INTO turn VALUES (:id, :parent, :conversation, :length, :last_token, :prompt,
                                         :reply, :messages, :carried, :note, 0, :hash, :created)""",
                turn._asdict() | dict(prompt=prompt, reply=reply, messages=json.dumps(shown),
                                      carried=carried))
            db.execute("""
                INSERT INTO conversation VALUES (:conversation, :id, NULL, '[]', :created, :created)
                ON CONFLICT (name) DO UPDATE SET head = :id, active = :created,
                    waiting = CASE WHEN :raw THEN waiting ELSE '[]' END""",
                turn._asdict() | dict(raw=text is None))
        return turn

    def match(self, messages: list[dict], hint: str | None = None, prefix: str = "",
              salt: str = "") -> tuple[Turn, int] | None:
        """The turn that a client continues when it resends its messages, and how many of them are
        known.

        The first n of `messages` are known if they are the visible messages up to the end of a
        turn; of these we compare what was `said`. We look for the turn with the largest n, but at
        least one message must be new. Among equal turns we prefer one of the conversation `hint`,
        then the head of any conversation, then the newest. (Thousands of chats may begin alike. So
        we look at the head of `hint`, and at the MOST_ALIKE newest of them.)

        prefix: an owner's; we only look at its conversations. "": at all. salt: see `commit`."""
        hashes = rolled(self._root(salt), messages, self._thinks)
        ends = [n for n in range(1, len(messages)) if messages[n - 1]["role"] == "assistant"]
        nth_hash = f"substr(:hashes, {HASH_BYTES} * (value - 1) + 1, {HASH_BYTES})"
        has = f"NOT hidden AND {owned_by(prefix, 'conversation')} AND hash ="
        with self._reading() as db:
            # The largest n of `ends` such that a turn has the hash of the first n messages. All
            # hashes are in one BLOB, 32 bytes each: SQL takes the nth.
            n, = db.execute(f"""
                SELECT max(value) FROM json_each(:ends)
                WHERE EXISTS (SELECT * FROM turn WHERE {has} {nth_hash})""",
                dict(ends=json.dumps(ends), hashes=b"".join(hashes), prefix=prefix)).fetchone()
            if n is None:
                return None
            # Of the turns with this hash, the one that the docstring prefers.
            turn = find_turn(db, f"""
                turn.rowid IN (
                    SELECT turn.rowid FROM conversation JOIN turn ON id = head
                        WHERE name = :hint AND {has} :hash
                    UNION ALL SELECT * FROM (SELECT rowid FROM turn WHERE {has} :hash
                                             ORDER BY rowid DESC LIMIT {MOST_ALIKE}))
                ORDER BY :hint IN (name, conversation) DESC, name = :hint DESC,
                         name IS NOT NULL DESC, turn.rowid DESC""",
                hash=hashes[n - 1], hint=hint, prefix=prefix)
        return turn, n

    def _root(self, salt: str) -> bytes:
        """The hash of no messages."""
        return digest(self._root_hash, salt) if salt else self._root_hash

    def forget(self, conversation: str):
        """Delete a conversation, and those of its turns that only it needed. An unknown name is no
        error."""
        with self._writing() as db:
            if record := find_record(db, conversation):
                db.execute("DELETE FROM conversation WHERE name = ?", (conversation,))
                delete_unneeded(db, record.head)

    def delete(self, turn_id: str) -> list[str]:
        """Delete a turn. If later turns build on it, it is only hidden, and goes with the last of
        them.

        A conversation that ended with the turn ends with the last visible turn before it now. If
        there is none, the conversation goes, too, unless a client created or edited it. Returns the
        names of these conversations."""
        with self._writing() as db:
            db.execute("UPDATE turn SET hidden = 1 WHERE id = ?", (turn_id,))
            names = db.execute("SELECT name FROM conversation WHERE head = ?",
                               (turn_id,)).fetchall()
            head = last_visible(db, turn_id)
            db.execute("UPDATE conversation SET head = ? WHERE head = ?", (head, turn_id))
            db.execute("DELETE FROM conversation WHERE head IS NULL AND metadata IS NULL")
            delete_unneeded(db, turn_id)
            return [name for name, in names]

    # ---- conversations

    def create(self, conversation: str, metadata: dict, messages: Iterable[dict] = ()):
        """Create a conversation without a turn. Its first turn will begin with `messages`.

        ValueError if it exists."""
        with self._writing() as db:
            if find_record(db, conversation):
                raise ValueError(f"conversation {conversation!r} exists already: use a new name")
            now = time.time()
            db.execute("INSERT INTO conversation VALUES (?, NULL, ?, ?, ?, ?)",
                       (conversation, json.dumps(metadata), json.dumps(list(messages)), now, now))

    def record(self, conversation: str) -> ConversationRecord | None:
        with self._reading() as db:
            return find_record(db, conversation)

    def update(self, conversation: str, metadata: dict | None = None,
               new: Sequence[dict] = ()) -> bool:
        """Replace the metadata, unless it is None; append messages to those that wait for the next
        turn. From now on the conversation counts as created by name. False if it does not exist."""
        with self._writing() as db:
            return db.execute("""
                UPDATE conversation SET active = :now,
                    metadata = coalesce(:metadata, metadata, '{}'),
                    -- '[a]' and '[b]' become '[a, b]'
                    waiting = CASE WHEN :new = '[]' THEN waiting WHEN waiting = '[]' THEN :new
                              ELSE rtrim(waiting, ']') || ', ' || substr(:new, 2) END
                WHERE name = :name""", dict(
                    name=conversation, now=time.time(), new=json.dumps(list(new)),
                    metadata=None if metadata is None else json.dumps(metadata))).rowcount > 0

    def items(self, conversation: str, start: str | None = None, newest_first: bool = False,
              limit: int | None = None) -> list[dict]:
        """The visible messages of a conversation, each once, in order, without those of deleted
        turns.

        Each has an id. The reply of turn T is msg_T; the messages before it are msg_T_0, msg_T_1,
        ... A message that waited for its turn keeps the id that it had.
        start, limit: see `items_from`."""
        with self._reading() as db:
            if (record := find_record(db, conversation)) is None:
                return []
            items = items_one_by_one(db, record.head, record.waiting, start, newest_first)
            return items_from(items, start, limit)

    def item(self, conversation: str, item_id: str) -> dict | None:
        """One of these messages."""
        with self._reading() as db:
            if (record := find_record(db, conversation)) is None:
                return None
            items = items_one_by_one(db, record.head, record.waiting, item_id, newest_first=True)
            return next((item for item in items if item["id"] == item_id), None)

    def input_items(self, turn_id: str, start: str | None = None, newest_first: bool = False,
                    limit: int | None = None) -> list[dict]:
        """The visible messages before the reply of a turn, those of earlier turns included.
        StaleTurn if the turn is gone. start, limit: see `items_from`."""
        with self._reading() as db:
            items = items_one_by_one(db, turn_id, [], start, newest_first)
            inputs = (item for item in items if item["id"] != f"msg_{turn_id}")
            return items_from(inputs, start, limit)

    def items_of(self, turn_id: str) -> list[dict]:
        """The visible messages that were new in a turn, its reply included. StaleTurn if the turn
        is gone."""
        with self._reading() as db:
            return items_of(db, turn_id)

    def delete_item(self, conversation: str, item_id: str) -> bool:
        """Delete one of a conversation's visible messages, and the results of its calls. False if
        there is no such message.

        If it is a message of a turn, the conversation ends before that turn now, and its other
        messages from there on wait for its next turn."""
        with self._writing() as db:
            if (record := find_record(db, conversation)) is None:
                return False
            head, items = record.head, record.waiting
            # From the end: `items` grows by a turn, and `head` goes back, until it has our item.
            while head and item_id not in [item["id"] for item in items]:
                items = items_of(db, head) + items
                head = find_turn(db, "id = :id", id=head).parent
            deleted = next((item for item in items if item["id"] == item_id), None)
            if not deleted:
                return False
            calls = [call["id"] for call in deleted.get("tool_calls", ())]
            remaining = [item for item in items
                         if item is not deleted and item.get("tool_call_id") not in calls]
            db.execute("""
                UPDATE conversation
                SET head = ?, waiting = ?, metadata = coalesce(metadata, '{}'), active = ?
                WHERE name = ?""",
                (last_visible(db, head), json.dumps(remaining), time.time(), conversation))
            delete_unneeded(db, record.head)
            return True

    def oldest(self, before: float, max_bytes: float, prefix: str = "",
               spared: Iterable[str] = ()) -> str | None:
        """The least recently active conversation whose name begins with the prefix, if it must go;
        else None.

        It must go if it was last active before `before` (seconds since 1970), or if the prefix's
        owner has stored more than max_bytes. The prefix "" stands for everybody's conversations:
        then the size of the file counts. spared: conversations that stay."""
        with self._write_lock:          # the table `stored` exists in the writing connection alone
            if prefix:
                size = "SELECT total(bytes) FROM stored WHERE owner = ?"
                stored, = self._db.execute(size, (prefix,)).fetchone()
            else:
                stored, = self._db.execute("""
                    SELECT page_size * (page_count - freelist_count)
                    FROM pragma_page_size, pragma_page_count, pragma_freelist_count""").fetchone()
            if stored > max_bytes:
                before = float("inf")
            row = self._db.execute(f"""
                SELECT name FROM conversation WHERE {owned_by(prefix, "name")} AND active < :before
                      AND name NOT IN (SELECT value FROM json_each(:spared))
                ORDER BY active LIMIT 1""",
                dict(prefix=prefix, before=before, spared=json.dumps(list(spared)))).fetchone()
        return row and row[0]

    def conversations(self) -> list[str]:
        """The names of all conversations, sorted."""
        with self._reading() as db:
            return [name for name, in db.execute("SELECT name FROM conversation ORDER BY name")]

    def close(self):
        """Close the file. No other method may be called after."""
        with self._write_lock, self._read_lock:
            self._open.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, self._reader:
            self._reader.execute("BEGIN")       # all queries see one state of the file
            yield self._reader

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all or nothing, and no other thread or process writes meanwhile."""
        self._begin()
        try:
            with self._db:
                yield self._db
        finally:
            self._write_lock.release()

    def _begin(self):
        """Take the lock and begin a transaction. OSError if the file was removed or replaced
        meanwhile: SQLite would go on writing to a file that nobody finds again.

        While another process writes to the file, we try again, for BUSY_SECONDS at most. Between
        two attempts we release the lock."""
        file, path = self._file, self.path
        if file is not None and not os.path.samestat(os.stat(path), os.fstat(file)):
            raise OSError(f"another file has replaced the history {path}: start the server again")
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            self._write_lock.acquire()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return                          # with the lock
            except BaseException as error:
                self._write_lock.release()
                if str(error) != "database is locked" or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


# --------------------------------------------------------------------------------------------------
# The file.

def open_alone(path: str | os.PathLike) -> int:
    """A descriptor of the file, which is made if there is none. While it is open, no other call for
    this file succeeds.

    ValueError if another server has it open, or if it is no regular file."""
    # opening a pipe must not wait
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{path} cannot be used as a history: name a regular file")
        # the system releases it when the process ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        # The descriptor stays open. To close it would drop SQLite's locks, if this process has the
        # file open.
        raise ValueError(f"another server uses the history {path}: "
                         "stop it, or name another file") from error
    except BaseException:
        os.close(file)
        raise
    return file


def untouched(path: str | os.PathLike) -> sqlite3.Connection:
    """A connection that changes nothing: SQLite neither makes nor reads a -wal file beside the
    file."""
    return sqlite3.connect(f"{Path(path).absolute().as_uri()}?immutable=1", uri=True)


def create_tables(db: sqlite3.Connection, fingerprint: str):
    """Create our tables, unless the file has tables already. Create the indexes that it lacks."""
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES (?)", (fingerprint,))
    for name, columns in INDEXES.items():
        db.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {columns}")


def check(db: sqlite3.Connection, path: str | os.PathLike, fingerprint: str):
    """ValueError or sqlite3.DatabaseError if it is not a history of ours with this fingerprint."""
    version, = db.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema version {version}, this program reads "
                         f"{SCHEMA_VERSION}: name another file")
    if db.execute("SELECT fingerprint FROM meta").fetchone() != (fingerprint,):
        raise ValueError(f"{path} was written with another tokenizer or chat template, its token "
                         "ids mean something else here: name another file for this model, or "
                         "delete this")


def check_ids(db: sqlite3.Connection, path: str | os.PathLike, vocab_size: int):
    """ValueError if a turn has a token id that the model does not know."""
    for turn_id, prompt, reply in db.execute("SELECT id, prompt, reply FROM turn"):
        try:
            ids = np.frombuffer(prompt + reply, np.int32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged, turn {turn_id}: "
                             f"{error}; name another file") from error
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"{path}: turn {turn_id} has a token id beyond the vocabulary of "
                             f"{vocab_size} tokens: name another file for this model")


def count_bytes(db: sqlite3.Connection):
    """From now on this connection keeps count of the bytes that each owner has stored.

    A row counts for its texts and token ids, its note, and 500 bytes of other columns and indexes.
    Triggers add the size of a row that is written, and subtract the size of a row that is deleted
    or replaced."""
    db.execute("CREATE TEMP TABLE stored (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL)")
    turn = "length({0}prompt) + length({0}reply) + length({0}messages) + length({0}note)"
    tables = dict(turn=("conversation", turn),
                  conversation=("name", "length({0}waiting) + coalesce(length({0}metadata), 0)"))
    for table, (name, size) in tables.items():
        def change(sign: str, row: str, source: str = "") -> str:
            return (f"INSERT INTO stored SELECT {OWNER.format(row + name)}, "
                    f"{sign} (500 + {size.format(row)}) {source} WHERE true "
                    "ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;")
        add, subtract = change("+", "new."), change("-", "old.")
        db.execute(change("+", "", f"FROM {table}"))            # the rows that are there now
        for event, steps in dict(INSERT=add, DELETE=subtract, UPDATE=subtract + add).items():
            db.execute(f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} "
                       f"BEGIN {steps} END")


# --------------------------------------------------------------------------------------------------
# Rows. The callers hold the connection's lock.

def owned_by(prefix: str, column: str) -> str:
    """SQL: does this name of a conversation begin with :prefix, an owner's? "" owns all."""
    return f"{OWNER.format(column)} = :prefix" if prefix else "true"


def find_turn(db: sqlite3.Connection, where: str, **values) -> Turn | None:
    """The first turn for which an SQL condition holds."""
    row = db.execute(f"{TURNS} WHERE {where}", values).fetchone()
    return Turn(*row) if row else None


def head_of(db: sqlite3.Connection, conversation: str) -> Turn | None:
    return find_turn(db, "name = :name", name=conversation)


def expect_head(db: sqlite3.Connection, conversation: str, expected: str | None):
    """StaleTurn if the conversation does not end with this turn. None: it must have no turn."""
    head = head_of(db, conversation)
    if (head and head.id) != expected:
        now = f"its last turn is {head.id}" if head else "it was forgotten"
        raise StaleTurn(f"conversation {conversation!r} does not end with {expected or 'nothing'} "
                        f"any more: {now}; read its head and try again")


def find_record(db: sqlite3.Connection, conversation: str) -> ConversationRecord | None:
    row = db.execute("SELECT * FROM conversation WHERE name = ?", (conversation,)).fetchone()
    if row is None:
        return None
    name, head, metadata, waiting, created, active = row
    return ConversationRecord(name, head, json.loads(metadata or "null"), json.loads(waiting),
                              created, active)


def last_visible(db: sqlite3.Connection, turn_id: str | None) -> str | None:
    """The turn if it is not hidden; else the last visible one before it."""
    find = "SELECT parent FROM turn WHERE id = ? AND hidden"
    while row := db.execute(find, (turn_id,)).fetchone():
        turn_id, = row
    return turn_id


def delete_unneeded(db: sqlite3.Connection, turn_id: str | None):
    """Delete a turn if nobody needs it, then its parent if nobody needs that, and so on.

    A later turn needs its parent. A conversation needs its head, which is never hidden."""
    unneeded = """
        SELECT parent FROM turn WHERE id = :id
        AND NOT EXISTS (SELECT * FROM turn AS later WHERE later.parent = :id)
        AND NOT EXISTS (SELECT * FROM conversation WHERE head = :id)"""
    while row := db.execute(unneeded, dict(id=turn_id)).fetchone():
        db.execute("DELETE FROM turn WHERE id = ?", (turn_id,))
        turn_id, = row


def chain(db: sqlite3.Connection, way: str, turn_id: str, columns: str) -> list[tuple]:
    """These columns of a turn and of all turns before it, the first turn first.

    way: CONTEXT or ANCESTRY. StaleTurn if the turn is gone."""
    rows = db.execute(f"""
        WITH RECURSIVE chain(turn_id, previous, depth) AS (
            SELECT id, {way}, 0 FROM turn WHERE id = ?
            UNION ALL SELECT id, {way}, depth + 1 FROM turn JOIN chain ON id = previous)
        SELECT {columns} FROM chain JOIN turn ON id = turn_id ORDER BY depth DESC""",
        (turn_id,)).fetchall()
    if not rows:
        raise StaleTurn(f"turn {turn_id} is gone")
    return rows


def items_one_by_one(db: sqlite3.Connection, head: str | None, waiting: list[dict],
                     start: str | None, newest_first: bool) -> Iterator[dict]:
    """The items of all turns up to `head`, then the waiting ones. We read each turn only when
    somebody asks for its items.

    start: nobody asks for items before this one. Most ids name a turn: then we begin with that
    turn."""
    places = [id for id, in chain(db, ANCESTRY, head, "id")] if head else []
    places.append(None)                 # for the messages that wait for the next turn
    if newest_first:
        places.reverse()
    turn_id = (start or "").removeprefix("msg_").partition("_")[0]
    for place in places[places.index(turn_id) if turn_id in places else 0:]:
        items = waiting if place is None else items_of(db, place)
        yield from reversed(items) if newest_first else items


def items_from(items: Iterable[dict], start: str | None, limit: int | None) -> list[dict]:
    """At most `limit` items, from the one with the id `start` on.

    start: None: begin with the first item. If no item has this id, the result is empty. limit:
    None: all."""
    if start is not None:
        items = dropwhile(lambda item: item["id"] != start, items)
    return list(islice(items, limit))


def items_of(db: sqlite3.Connection, turn_id: str) -> list[dict]:
    """The visible messages that were new in a turn, with their ids. StaleTurn if the turn is
    gone."""
    row = db.execute("SELECT messages, coalesce(carried, 0), hidden FROM turn WHERE id = ?",
                     (turn_id,)).fetchone()
    if row is None:
        raise StaleTurn(f"turn {turn_id} is gone")
    text, carried, hidden = row
    messages = [] if hidden else json.loads(text)[carried:]
    ids = [f"msg_{turn_id}_{i}" for i in range(len(messages) - 1)] + [f"msg_{turn_id}"]
    return [dict(id=id) | message for id, message in zip(ids, messages)]


def new_id() -> str:
    """96 random bits, so that nobody can guess it."""
    return secrets.token_hex(12)


def digest(previous: bytes, *texts: str) -> bytes:
    """sha256 of a digest (or of nothing) and texts. JSON keeps ("ab", "c") apart from ("a",
    "bc")."""
    return hashlib.sha256(previous + json.dumps(texts).encode()).digest()


def rolled(start: bytes, messages: list[dict], thinks: bool) -> list[bytes]:
    """The rolling hash after each message: h_i = sha256(h_{i-1}, role, what was said)."""
    hashes = [start]
    for message in messages:
        hashes.append(digest(hashes[-1], message["role"], said(message, thinks)))
    return hashes[1:]


def said(message: dict, thinks: bool) -> str:
    """What counts of a message: its content, and which call a tool's result answers.

    Of a reply: the text behind its thoughts, without white space around it, since many clients and
    chat templates send back no more: "<think>2 + 2</think> 4\\n" -> "4". (If it was cut off in its
    thoughts, they are the text.) And the values of its calls, since a client parses their JSON and
    writes it anew."""
    if message["role"] == "assistant":
        thoughts, end, text = tools.without_thoughts(message["content"], thinks)
        text = (text if end else thoughts + text).strip()
        calls = message.get("tool_calls")
        return f"{text}\0{tools.canonical(calls)}" if calls else text
    if "tool_call_id" in message:
        return f"{message['content']}\0{message['tool_call_id']}"
    return message["content"]
