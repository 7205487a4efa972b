"""What the tests of the server share: a checkpoint, a server in this process or in one of its own, and
clients, well-behaved or not."""
import contextlib
import http.client
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import accumulate
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from serving.sockets import Drained, Server, listen

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEMPLATE = ("{% for message in messages %}"
            "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
CONTEXT = 2048


def save_random_gpt2(directory: Path, vocab_size: int):
    """Its last token is the end token."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=CONTEXT, n_embd=48, n_layer=2,
                                       n_head=2, eos_token_id=vocab_size - 1, bos_token_id=vocab_size - 1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)


def make_checkpoint(directory: Path):
    """A random model over printable ASCII, a token for each character, so that any reply is valid text."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {("Ġ" if c == 32 else chr(c)): c - 32 for c in range(32, 127)}
    library = Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer, library.decoder = letters, decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    save_random_gpt2(directory, 99)
    library.save(str(directory / "tokenizer.json"))
    settings = dict(eos_token="<|end|>", chat_template=TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_noise(directory: Path, context: int):
    """A random model over tiny_chat's vocabulary, for any context. It says noise, in any letters, and comes
    to an end: as the likeliest token the end token comes every tenth time or so, what ends a string or an
    object of JSON likewise."""
    directory.mkdir()
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(ROOT / "tiny_chat" / name, directory)
    end, likely = 511, [1, 93, 511]                          # the tokens " } and <|end|>
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=context, n_embd=48, n_layer=2, n_head=2,
                                       eos_token_id=end, bos_token_id=end, tie_word_embeddings=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    body, norm, head = model.transformer, model.transformer.ln_f, model.lm_head.weight.data
    for embedding in body.wte, body.wpe:                     # these say most: no reply runs in circles
        torch.nn.init.normal_(embedding.weight)
    torch.nn.init.normal_(head, std=48**-0.5)
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    norm.weight.data[0], norm.bias.data[0] = 0, 1            # a bias for each token
    head[:, 0] = 0
    head[likely, 0] = 1.5                                    # all other logits are N(0, 1)
    model.save_pretrained(directory)


@contextlib.contextmanager
def serving(sessions, host="127.0.0.1", **options):
    """A server in this process; its `drained` is set once it has stopped by itself."""
    def loop():
        try:
            server.serve_forever(poll_interval=0.01)
        except Drained:
            server.drained.set()

    server = Server(listen(host, 0), sessions.start(), **options)
    server.drained, thread = threading.Event(), threading.Thread(target=loop)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        sessions.close()


class Script:
    """The next replies, as texts. A request takes the first that is left when it samples its first token."""

    def __init__(self, sessions):
        self.replies, self.running, self.tokenizer = [], {}, sessions.tokenizer
        self.worker, self.launch = sessions.engine.worker, sessions.engine.worker.launch
        self.worker.launch = self.execute_launch
        self.worker.execute = lambda batch: self.execute_launch(batch)()

    def ids(self, text):
        """A special token's text is that token, as the model samples it."""
        return self.tokenizer._encode(text) + [self.tokenizer.special["<|end|>"]]

    def execute_launch(self, batch):
        requests, wait = [span.request for span in batch.spans if span.samples], self.launch(batch)

        def result():
            return wait()._replace(tokens=[self.next(request) for request in requests])
        return result

    def next(self, request):
        if id(request) not in self.running:
            self.running[id(request)] = request, self.ids(self.replies.pop(0))
        return self.running[id(request)][1][len(request.generated)]


def connect(url, key="none"):
    # here, so that machines without it run all other tests
    import openai
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=30)


def user(text):
    return dict(role="user", content=text)


def ask(client, messages, stream=False, **options):
    """(text, finish_reason, usage, conversation_id), however it is asked for."""
    options = dict(model="ascii", messages=messages, max_tokens=16) | options
    if not stream:
        answer = client.chat.completions.create(**options)
        choice, = answer.choices
        return choice.message.content, choice.finish_reason, answer.usage, answer.conversation_id
    options["stream_options"] = dict(include_usage=True)
    chunks = list(client.chat.completions.create(stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    return text, chunks[-2].choices[0].finish_reason, chunks[-1].usage, chunks[0].conversation_id


def eventually(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def fetch(server, method, path, body=None, headers=None):
    """(status, content) of one plain HTTP request."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    body = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.getheader("Content-Type") == "application/json"
    return response.status, json.loads(content) if is_json else content.decode()


def raw(server, *pieces):
    """All that is answered to these bytes, until the server hangs up."""
    with socket.create_connection(server.server_address, timeout=30) as connection:
        with contextlib.suppress(ConnectionError):          # it may hang up before it has heard all
            for piece in pieces:
                connection.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(2**16):
                answer += received
        return answer


@contextlib.contextmanager
def program(checkpoint, history, *flags):
    """python server.py, on a port of its choice: (process, url, banner)."""
    command = [sys.executable, "-u", ROOT / "server.py", "--model", checkpoint, "--port", "0", "--history",
               history, *flags]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=environment) as process:
        try:
            banner = ""
            while not (url := re.search(r"http://[\d.:]+", banner)):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                banner += line
            yield process, url[0], banner
        finally:
            process.kill()


def posting(body, path="/v1/chat/completions"):
    """The bytes of a request."""
    body = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(body)) + body


def hang_up_after(server, body, condition, path="/v1/chat/completions"):
    """Asks, waits, and hangs up without having read all of the answer."""
    with socket.create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(posting(body, path))
        eventually(condition)


ZYGOTE = """
import json, os, sys
import server
for line in sys.stdin:
    sys.argv, before = json.loads(line)
    if not (pid := os.fork()):
        print("pid", os.getpid(), flush=True)
        exec(before)
        server.main()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    # on a line of its own: a server that was killed may have left half a line
    print("\\nexit", os.waitstatus_to_exitcode(status), flush=True)
"""


class Zygote:
    """Has imported all that a server needs, and forks servers: python server.py in a tenth of a second."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-u", "-c", ZYGOTE], cwd=ROOT, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                        env=os.environ | dict(OMP_NUM_THREADS="1"), start_new_session=True)
        self.pid = None                                      # of a server that has not been seen to end
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _read(self, pattern):
        others = []
        with contextlib.suppress(queue.Empty):
            while line := self.lines.get(timeout=120):
                if found := re.search(pattern, line):
                    return found[1]
                others.append(line)
        raise AssertionError(f"the server has gone, or said nothing for two minutes; before that {others}")

    def start(self, checkpoint, history, *flags, before="") -> tuple[int, str]:
        """(pid, url). before: what the new process executes first."""
        # a test has failed: the next one is served all the same
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        argv = ["server.py", "--model", str(checkpoint), "--port", "0", "--history", str(history), *flags]
        print(json.dumps([argv, before]), file=self.process.stdin, flush=True)
        self.pid = int(self._read(r"^pid (\d+)"))
        return self.pid, self._read(r"(http://[\d.:]+)")

    def exit_code(self) -> int:
        """Waits for the last one to end; negative: the signal that ended it."""
        self.pid = None
        return int(self._read(r"^exit (-?\d+)"))

    def close(self):
        """With whatever a test that failed has left running."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def numbered(events):
    """Are the events of a response numbered from 0 on, each delta by the last character that it has?"""
    deltas = [event["delta"] if event["type"] == "response.output_text.delta" else " " for event in events]
    ends = accumulate(map(len, deltas), initial=-1)
    return [event["sequence_number"] for event in events] == list(ends)[1:]
