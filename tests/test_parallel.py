"""Several processes that share a model answer as one does; and when one of them dies, all end."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import PRESETS
from clients import eventually
from kv_cache import Ticket
from model import Alone, ModelConfig, empty_model, share
from parallel import Follower, Leader
from serving.sessions import Sessions
from streams import Recorder
from worker import pack, table_changes

TESTS = Path(__file__).parent


def torchrun(program, *arguments):
    """Two processes, started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               TESTS / program, *arguments]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = os.environ | dict(PYTHONPATH=paths, OMP_NUM_THREADS="1")
    return subprocess.Popen(list(map(str, command)), env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


@pytest.mark.torchrun
def test_two_processes_answer_as_one_and_as_transformers(tmp_path):
    started = torchrun("parallel_program.py", tmp_path)
    output, errors = started.communicate()
    assert started.returncode == 0 and output.endswith("all the same\n"), output + errors


@pytest.mark.torchrun
def test_a_program_needs_no_branch(tmp_path):
    """Rank 0 alone gets an engine; when it is closed, the other process ends well."""
    started = torchrun("parallel_chat.py", tmp_path / "history", "2")
    output, errors = started.communicate()
    lines = output.splitlines()
    assert started.returncode == 0, errors
    assert sorted(line.split()[:2] for line in lines if line.startswith("process")) == [
        ["process", "0"], ["process", "1"]]
    lines.remove("follower still joined: False")
    assert [line.split()[0] for line in lines if "process" not in line] == ["told", "told", "closed"]


@pytest.mark.torchrun
def test_kill_9_of_one_rank_ends_all_and_loses_nothing(tmp_path):
    started = torchrun("parallel_chat.py", tmp_path / "history", "1000000")
    lines = []
    while sum(line.startswith("told") for line in lines) < 3:
        lines.append(started.stdout.readline())
    survivor, victim = (int(line.split()[2]) for line in sorted(lines) if line.startswith("process"))
    os.kill(started.pid, signal.SIGSTOP)            # torchrun would end rank 0, too, perhaps sooner
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: Path(f"/proc/{survivor}/stat").read_text().rpartition(") ")[2].startswith("Z"), 20)
    os.kill(started.pid, signal.SIGCONT)
    output, errors = started.communicate()
    assert started.returncode != 0
    assert "rank 1 is gone, so rank 0 ends\n" in errors
    assert "Traceback" not in errors.partition("rank 1 is gone")[0]

    told = [json.loads(line[5:]) for line in lines + output.splitlines() if line.startswith("told")]
    sessions = Sessions("tiny_chat", history=tmp_path / "history", device="cpu", gpu_cache_tokens=1024)
    for number, reply in enumerate(told):
        turn = sessions.history.head(f"c{number}")
        assert sessions.history.tokens(turn.id).tolist()[-len(reply):] == reply
    assert sessions.chat("And?", "c0", max_tokens=5).usage["prompt_tokens"] > len(told[0])
    sessions.close()


def ticket(direction):
    return Ticket(None, None, direction, 0, 4, slots=[1, 2, 3, 4], place=0)


def test_a_follower_waits_for_copies_that_have_ended_only_on_rank_0():
    """A copy out; then, since it has landed on rank 0, other KV arrives in the same slots and from
    the same place. On the follower no copy ends before the host waits for it, and the host never
    does."""
    model, told = empty_model(ModelConfig(50, 2, 2, 2, 16, 16, 64, "relu"), "cpu", torch.float32), []
    wire = Alone()
    wire.tell = told.append
    leader, follower = (kind(wire, model, 32, 4, 4, 2, 16) for kind in (Leader, Follower))
    for swap_in, swap_out in (([], [ticket("out")]), ([ticket("in")], []), ([], [])):
        leader._start(pack([]), table_changes([]), {}, swap_in, swap_out)
        leader.pool.landed(wait=True)
    recorder = Recorder(follower.pool)
    with recorder:
        for numbers in told:
            follower.take_part(numbers)
    assert not recorder.races() and not recorder.host_waited and not follower.pool.flights
    assert len(recorder.accesses) >= 4


def test_what_cannot_be_shared_is_refused_by_name():
    share(PRESETS["llama2-70b"], 8)
    with pytest.raises(ValueError, match="num_kv_heads 8 cannot be shared evenly by 16 processes"):
        share(PRESETS["llama2-70b"], 16)
    with pytest.raises(ValueError, match="num_heads 12 cannot be shared evenly by 5 processes"):
        share(PRESETS["opt-125m"], 5)
