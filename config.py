"""Every flag of server.py and bench.py, and every keyword of Engine, in one table.

A field's name is the keyword, and the flag with dashes; its type, default, help and choices are the flag's."""
import argparse
from dataclasses import dataclass, field, fields

from eviction import POLICIES


def require(ok: bool, name: str, what: str, value):
    if not ok:
        raise ValueError(f"{name} must be {what}, got {value!r}")


def flag(default, help: str, choices=None):
    return field(default=default, metadata=dict(help=help, choices=choices))


@dataclass(frozen=True)
class Config:
    """ValueError for a value that cannot be meant."""
    model: str = flag("tiny_chat", "a checkpoint's directory, a hub name, or with --random-weights a preset")
    random_weights: bool = flag(False, "do not load the model's weights, make some up (for measuring)")
    device: str = flag("auto", "where model and first tier are", ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "of weights and cache; auto: bfloat16 on CUDA, float32 elsewhere", ("auto", "float32", "float16", "bfloat16"))
    gpu_cache_tokens: int = flag(None, "slots of the first tier; by default what memory allows")
    cpu_cache_tokens: int = flag(None, "size of the second tier, in whole chunks; 0: none (the paper's GPU cache variant)")
    chunk_size: int = flag(32, "tokens moved and evicted together")
    max_batch_tokens: int = flag(512, "tokens computed in one step")
    max_running: int = flag(64, "requests served at once")
    swap_threshold: float = flag(0.25, "share of the slots to keep available by copying ahead of time; 0: only on demand")
    reserve: float = flag(0.10, "share of the slots that admission leaves for the growth of running requests")
    policy: str = flag("retention", "what leaves first", tuple(POLICIES))
    stateless: bool = flag(False, "forget all KV at the end of each request, as other servers do")
    separate_phases: bool = flag(False, "never mix prefill and decode in a batch")
    no_pipeline: bool = flag(False, "wait for all of a swap-in before the model starts")
    system_prompt: str = flag(None, "text, or a file of it, that a chat without a system message begins with; its KV is shared and never evicted")
    eager: bool = flag(False, "on CUDA: compile nothing, and launch every kernel of a decode from the host")
    history: str = flag(None, "file that keeps every conversation's turns; in-process default: memory only")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser):
        for entry in fields(cls):
            name, text = "--" + entry.name.replace("_", "-"), entry.metadata["help"]
            if entry.type is bool:
                parser.add_argument(name, action="store_true", help=text)
            else:
                shown = "" if entry.default is None else f" (default: {entry.default})"
                parser.add_argument(name, type=entry.type, default=entry.default, choices=entry.metadata["choices"], help=text + shown)

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> dict:
        """The keywords of Engine among parsed arguments."""
        return {entry.name: getattr(arguments, entry.name) for entry in fields(cls)}

    def __post_init__(self):
        for name, least in dict(gpu_cache_tokens=1, cpu_cache_tokens=0, chunk_size=1, max_batch_tokens=1, max_running=1).items():
            if (value := getattr(self, name)) is not None:
                require(type(value) is int and value >= least, name, f"an int of at least {least}", value)
        for name in ("swap_threshold", "reserve"):
            require(0 <= getattr(self, name) < 1, name, "a share of the slots, at least 0 and below 1", getattr(self, name))
        for entry in fields(self):
            if choices := entry.metadata["choices"]:
                value = getattr(self, entry.name)
                require(isinstance(value, type) or value in choices, entry.name, f"one of {', '.join(choices)}", value)
