"""In a starter: the functions whose bodies are not shown, those of this lab and of later ones.

`lab.py start` moves them from their files into labs/given.json, and ends each such file with a call
of `fill`, which puts the functions of later labs in place when the file is imported:

    kv_cache.py    def admit(self, ...):  docstring, then no body        labs/given.json: the rest
                   fill(globals(), "KVCache.admit")                      KVCache.admit works

So the system runs, and no answer stands beside the question. This is a curtain, not a lock: the
text is compressed, so nobody reads it by accident, and three lines of Python unpack it. It is text
and not compiled code, so every version of Python can run it.

Invariant: without given.json, in the solved project, `fill` does nothing.
"""
import base64
import json
import linecache
import zlib
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("given.json")


def pack(source: str) -> str:
    return base64.b85encode(zlib.compress(source.encode())).decode()


@cache
def given() -> dict[str, str]:
    """Qualified name of a function -> its source, without indentation. File -> its solved source,
    for the grader."""
    packed = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {name: zlib.decompress(base64.b85decode(text)).decode() for name, text in packed.items()}


def fill(module: dict, *names: str):
    """Put these functions into a module, or into its classes. module: its globals()."""
    sources = given()
    for name in names:
        if name in sources:
            *classes, function = name.split(".")
            # Annotations may name what is missing on this machine, such as Triton.
            source = "from __future__ import annotations\n" + sources[name]
            file, found = f"<given: {name}>", {}
            if "@jit" in source:        # Triton reads the source; a traceback would show it, too
                linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
            exec(compile(source, file, "exec"), module, found)
            if classes:
                setattr(module[classes[0]], function, found[function])
            else:
                module[function] = found[function]
