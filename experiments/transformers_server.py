"""The chat server that one would write around a PyTorch model: a rival under `bench.py chats`.

    python -m experiments.transformers_server DIR --keep 3      remembers the KV of three chats
    python -m experiments.transformers_server DIR --keep 0      remembers nothing

It answers `POST /v1/chat/completions` with a stream, greedily and in float32, one request after the
other. What it remembers of a chat is transformers' `past_key_values`. A prompt that continues the
chat computes only its new tokens. Of more chats than `--keep` it forgets the one idle for longest.
"""
import argparse
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache


class Transformers:
    """A model, its tokenizer, and the KV of the chats used last."""

    def __init__(self, directory: str, keep: int):
        """keep: how many chats to remember."""
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.end = self.tokenizer.eos_token_id
        self.keep = keep
        self.kept: list[tuple] = []     # of a chat: its prompt's ids, all its ids, past_key_values

    def past(self, prompt: list[int]) -> tuple[int, Cache]:
        """(n, KV of the prompt's first n tokens), from the chat that the prompt continues."""
        for chat in self.kept:
            asked, ids, past = chat
            if prompt[:len(asked)] == asked:
                self.kept.remove(chat)
                known = len(os.path.commonprefix([ids, prompt[:-1]]))   # the last one has a logit
                past.crop(known - len(ids))                             # remove so many tokens
                return known, past
        return 0, DynamicCache()

    @torch.inference_mode()
    def reply(self, body: dict, send: Callable[[str], None]) -> dict:
        """Answer a chat completion, token by token -> its usage."""
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False)
        known, past = self.past(prompt)
        ids, done = [*prompt], known
        while len(ids) < len(prompt) + body["max_tokens"]:
            logits = self.model(torch.tensor([ids[done:]]), past_key_values=past,
                                logits_to_keep=1).logits                    # [1, 1, vocabulary]
            done = len(ids)
            ids.append(int(logits[0, -1].argmax()))
            send(self.tokenizer.decode(ids[-1:], skip_special_tokens=True))
            if ids[-1] == self.end and not body.get("ignore_eos"):
                break
        self.kept = [*self.kept, (prompt, ids[:done], past)][-self.keep:] if self.keep else []
        return dict(prompt_tokens=len(prompt), completion_tokens=len(ids) - len(prompt),
                    prompt_tokens_details=dict(cached_tokens=known))


def transformers_server(port: int, directory: str, keep: int) -> ThreadingHTTPServer:
    model, lock = Transformers(directory, keep), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):                                           # /v1/models
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(dict(data=[dict(id=directory)])).encode())

        def do_POST(self):                                          # /v1/chat/completions
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            with lock:
                usage = model.reply(body, lambda text: self.event([dict(delta=dict(content=text))]))
            self.event([], usage=usage)

        def event(self, choices: list[dict], **fields):
            self.wfile.write(f"data: {json.dumps(dict(choices=choices, **fields))}\n\n".encode())
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a directory, as save_pretrained writes it")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--keep", type=int, default=3, help="chats to remember (default: 3)")
    options = parser.parse_args()
    with transformers_server(options.port, options.model, options.keep) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
