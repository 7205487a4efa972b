"""The paper's evaluation from the command line: measured on this machine, or
simulated at the paper's scale.

    python bench.py                      three systems on the embedded model, measured, one minute
    python bench.py fig10 --simulate     a figure of the paper, on a cost model of its machines
    python bench.py fig10                the same figure in small, measured on this machine
    python bench.py --help               all figures

This file has the flags and the output. The rest of an experiment lies in experiments/:

    figures.py         the paper's figures: which systems run under which loads
    more_figures.py    the other figures
    curves.py          how two systems are compared
    run.py             one run: from planned conversations to one row of a table

Compare measured columns of one run only, because machines are noisy.
Simulations repeat to the last digit.
"""
import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch

from config import Config
from experiments.curves import Figure, Found, over_seeds
from experiments.figures import PAPER
from experiments.more_figures import MORE
from experiments.run import panel_title
from experiments.simulator import HARDWARE
from experiments.traces import KINDS, load
from experiments.workload import SHAPES
from parallel import follow_every_engine

FIGURES = {**PAPER, **MORE}

# ---- flags

def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def think(text: str) -> float | str:
    return text if text == "reading" else positive(text)


def rates(text: str) -> tuple:
    return tuple(sorted(map(positive, text.split(","))))


def list_of_figures() -> str:
    lines = [f"  {name:12}{figure.about}" for name, figure in FIGURES.items()]
    return "\n".join(["figures (and how long they take on two cores, without a GPU):", *lines])


def own_seeds() -> str:
    return ", ".join(f"{figure.seeds} for {name}" for name, figure in FIGURES.items()
                     if figure.seeds > 1)


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags below, and every field of Config. None stands for "the figure's own".

    `given` holds the fields of Config that the user gave, except the model, as keywords of
    Engine."""
    parser = argparse.ArgumentParser(
        usage="python bench.py [FIGURE] [flags]", description=__doc__.partition("\n")[0],
        allow_abbrev=False,
        epilog=list_of_figures(), formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("figure", nargs="?", default="default", choices=FIGURES, metavar="FIGURE",
        help="one of the figures below (default: default)")
    add("--simulate", action="store_true",
        help="use a cost model of the paper's machines, not this machine")
    add("--json", metavar="FILE", help="also write the figure to FILE")
    add("--plot", metavar="FILE", help="also draw the figure as a PNG")
    add("--seed", type=int, default=0, help="seed of conversations and prompts (default: 0)")
    add("--seeds", type=int, choices=range(1, 101), metavar="N",
        help="repeat the figure for N seeds; ratios are means, with their standard deviation as "
             f"spread (default: 1; simulated and without a --trace: {own_seeds()})")

    add = parser.add_argument_group("load, instead of the figure's own").add_argument
    add("--trace", metavar="FILE",
        help="replay a file of conversations: " + ", ".join(kind.name for kind in KINDS))
    add("--tokenizer", metavar="MODEL", default="gpt2",
        help="counts the tokens of a file of texts (default: gpt2)")
    add("--dataset", choices=SHAPES,
        help="synthetic conversations with the lengths of this dataset")
    add("--rates", type=rates, metavar="R,R,...", help="turns per second; where systems are "
        "compared at a latency, only some of them are played")
    add("--think", type=think, metavar="SECONDS",
        help="mean think time; or \"reading\": 100 ms per token of the reply, at least 5 s")
    add("--warm", type=positive, metavar="SECONDS",
        help="compare Pensieve with itself when its users give a hint so many seconds before each "
             "turn: for figures that play systems under rising load, such as fig15")
    add("--seconds", type=positive, default=1500.0,
        help="length of a run, of which the first third only fills the caches; the embedded "
             "model's own load and a trace with times end by themselves (default: 1500)")
    add("--at-ms", type=positive, metavar="MS",
        help="compare throughputs at this normalized latency")

    add = parser.add_argument_group("machine").add_argument
    add("--hardware", metavar="NAME",
        help=f"simulate {', '.join(HARDWARE)} (default: a100; h100 for a trace), or the machine "
             "that `python bench.py profile --json NAME` has measured")
    add("--gpus", type=int, choices=range(1, 9), metavar="N", help="GPUs of a simulation, 1 to 8")
    add("--cpu-gb", type=positive, metavar="GB",
        help="CPU tier of each GPU of a simulation (default: 220)")
    add("--jobs", type=int, default=os.cpu_count(),
        help="simulations at once (default: the number of cores)")
    add("--profile", metavar="FILE",
        help="cost of recomputation that `python bench.py profile --json FILE` has measured "
             "(default: measure it at each start)")
    add("--url", default="http://127.0.0.1:8000",
        help="server that `serve` and `chats` drive (default: http://127.0.0.1:8000)")
    add("--server-key", metavar="KEY", help="the server's API key")
    add("--server-pid", metavar="PID", type=int,
        help="the server's process on this machine: `chats` measures its CPU time and memory")

    Config.add_flags(parser.add_argument_group("engine"))
    parser.set_defaults(**dict.fromkeys(Config.names()))        # None: not given
    options = parser.parse_args(argv)
    for name in ("hardware", "gpus", "cpu_gb"):
        if getattr(options, name) and not options.simulate:
            parser.error(f"--{name.replace('_', '-')} needs --simulate: add --simulate")
    if options.simulate and options.guesses:
        parser.error("--guesses: simulated tokens are all the same, so guesses would all be right")
    if options.trace and options.dataset:
        parser.error("--trace and --dataset are two loads: give one of them")
    for file in filter(None, (options.json, options.plot)):
        if Path(file).is_dir() or not Path(file).parent.is_dir():
            parser.error(f"{file} cannot be written: name a file in a directory that exists")
    if options.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    options.given = {name: value for name, value in Config.given(options).items()
                     if name != "model" and value is not None}
    return options


# ---- output

def panel_of(row: dict) -> str:
    """The diagram and the table to which a row belongs."""
    if "model" not in row:
        return "this machine"
    return panel_title(**{name: row[name]
                          for name in ("model", "dataset", "think", "cpu_gb", "per_query_head")
                          if name in row})


def by_panel(rows: list[dict]) -> dict[str, list[dict]]:
    panels = {}
    for row in rows:
        panels.setdefault(panel_of(row), []).append(row)
    return panels


def print_rows(figure: Figure, rows: list[dict]):
    """A table for each panel; or one, if its columns name model and dataset, or if the figure
    has no columns."""
    if {"model", "dataset"} <= {*figure.columns} or not figure.columns:
        print_table(rows, figure.columns)
        print()
        return
    for panel, of_panel in by_panel(rows).items():
        columns = [name for name in ("seed", *figure.columns, "too_short")
                   if any(name in row for row in of_panel)]
        print(panel)
        print_table(of_panel, columns)
        print()


def print_by_turn(rows: list[dict]):
    """One table of run.by_turn for all rows; of several seeds, the first."""
    lines = [dict(system=row["system"], request_rate=row.get("request_rate"), **group)
             for row in rows if row.get("seed") == rows[0].get("seed")
             for group in row.get("by_turn", ())]
    if lines:
        print("turn by turn")
        print_table(lines, [name for name in lines[0] if lines[0][name] is not None])
        print()


def print_table(rows: list[dict], columns: Sequence[str] = ()):
    """One line for each row, with these columns. Without columns, one line
    for each field of the rows."""
    if columns:
        lines = [columns] + [[row.get(name) for name in columns] for row in rows]
    else:
        names = dict.fromkeys(chain(*rows))                     # every field once, in order
        names.pop("by_turn", None)                              # see print_by_turn
        lines = [[name] + [row.get(name) for row in rows] for name in names]
    lines = [[cell(value) for value in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        padded = [text.rjust(width) for text, width in zip(line, widths)]
        padded[0] = line[0].ljust(widths[0])
        print("  ".join(padded))


def cell(value: str | int | float | None) -> str:
    """12345 -> 12,345; 1234.5 -> 1,234.500; 0.0123 -> 0.0123."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def write_json(path: str, name: str, found: Found, seed: int):
    """The figure, and everything that is needed to make it again."""
    machine = [platform.machine(), f"{os.cpu_count()} cores"]
    if torch.cuda.is_available():
        machine.append(torch.cuda.get_device_name())
    machine += [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    figure = dict(figure=name, command=command(sys.argv), commit=commit(),
                  machine=", ".join(machine), seed=seed, rows=found.rows, ratios=found.ratios)
    Path(path).write_text(json.dumps(figure, indent=1) + "\n")


def command(argv: list[str]) -> str:
    """The command line, to run it again. It does not tell the server's key: files are passed on."""
    words = ["KEY" if before == "--server-key" else word
             for before, word in zip(["python", *argv], argv)]
    words = ["--server-key=KEY" if word.startswith("--server-key=") else word for word in words]
    return shlex.join(["python", *words])


def commit() -> str:
    """The commit of this code, with a "+" if it has changed since; "unknown"
    without git or a repository."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty=+"],
                             cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return git.stdout.strip() or "unknown"


# Fields of rows, in words, with their units.
WORDS = dict(
    throughput="throughput (turns/s)", request_rate="load (turns/s)", context="context (tokens)",
    history="history (tokens)", seconds="time (s)", mean_ttft_ms="mean time to first token (ms)",
    normalized_latency_ms="normalized latency (ms/token)", computed_tokens="computed tokens",
    recomputed_seconds="recomputation (s)", servers="servers", replies="replies to a prompt",
    turn="turn", ttft_ms="time to first token (ms)",
    running="requests at once", tokens_per_second="throughput (tokens/s)",
    saved="slots saved (share)", idle="idle conversations")


def plot(figure: Figure, rows: list[dict], path: str):
    """Draw the figure as a PNG: of several seeds, the first."""
    from matplotlib.figure import Figure as Canvas          # here, since only --plot needs it
    rows = [row for row in rows if figure.x in row and row.get("seed") == rows[0].get("seed")]
    if not rows:
        raise ValueError(f"there is nothing to plot: no row has {figure.x}")
    canvas = Canvas(layout="constrained")
    if figure.bars or all(row[figure.x] is None for row in rows):  # a trace has one load: its own
        draw_bars(canvas, rows, figure.bars or (figure.y,))
    else:
        draw_lines(canvas, by_panel(rows), figure.x, figure.y, figure.linear)
    canvas.savefig(path, dpi=100, format="png")


def three_digits(value: float) -> str:
    """12345.6 -> 12,346; 44.54 -> 44.5."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_bars(canvas, rows: list[dict], fields: tuple):
    """A diagram for each field, and in it a bar for each row."""
    canvas.set_size_inches(3.5 * len(fields), 4)
    canvas.suptitle(panel_of(rows[0]))
    for ax, field in zip(canvas.subplots(1, len(fields), squeeze=False)[0], fields):
        values = [row[field] for row in rows]
        bars = ax.bar([row["system"] for row in rows], values)
        ax.bar_label(bars, [three_digits(value) for value in values])
        ax.set(title=WORDS[field])


def draw_lines(canvas, panels: dict[str, list[dict]], x: str, y: str, linear: bool = False):
    """A diagram for each panel, and in it a line for each system: for each
    way to run it, or chunk size."""
    canvas.set_size_inches(5 * len(panels), 4)
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    for ax, (panel, rows) in zip(axes, panels.items()):
        lines = {}
        for row in rows:
            label = ", ".join(str(row[field])
                              for field in ("system", "how", "chunk") if field in row)
            lines.setdefault(label, []).append((row[x], row[y]))
        for label, points in lines.items():
            drawn, = ax.plot(*zip(*sorted(points)), marker="o", label=label)
            if linear:
                last = max(points)
                ax.annotate(f"{label}: {three_digits(last[1])}", last, (0, 8), ha="right",
                            weight="bold", textcoords="offset points", color=drawn.get_color())
                ax.margins(y=0.12)              # the highest name, too, stands inside
        ax.set(title=panel, xlabel=WORDS[x], ylabel=WORDS[y], yscale="linear" if linear else "log")
        if max(row[x] or 0 for row in rows) > 1000 * min(row[x] or 1 for row in rows):
            ax.set(xscale="log")
    if not linear:
        axes[0].legend()


def main():
    try:
        options = parse_flags()
        follow_every_engine()               # under torchrun only rank 0 goes on from here
        options.conversations = load(options.trace, options.tokenizer) if options.trace else None
        figure = FIGURES[options.figure]
        seeds = options.seeds or (figure.seeds if options.simulate and not options.trace else 1)
        found = over_seeds(figure.run, seeds, options)
        print_rows(figure, found.rows)
        if options.trace or options.figure in ("default", "serve"):
            print_by_turn(found.rows)
        if any("too_short" in row for row in found.rows):
            print("too_short: the run was too short. GPU, CPU: this tier never filled up. hits:\n"
                  "the hit rates still change. load: the contexts still grow. Give --seconds a\n"
                  "larger number, or the tiers fewer tokens.\n")
        # Some figures' ratios also have the spread over the seeds, or
        # the value that they must reach.
        more = [name for name in ("spread", "must") if any(name in ratio for ratio in found.ratios)]
        print_table(found.ratios, ("name", "paper", "ours", "how", *more))
        if options.json:
            write_json(options.json, options.figure, found, options.seed)
        if options.plot:
            plot(figure, found.rows, options.plot)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
