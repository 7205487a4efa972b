"""Agents that are written for Node, unmodified, against python server.py with random weights: each
calls a tool, sends its result, and finds in the cache what it has sent before. They are installed,
outside of the repository, by

    npm install node@22 opencode-ai @openai/codex @qwen-code/qwen-code @continuedev/cli \\
        ai @ai-sdk/openai @ai-sdk/openai-compatible zod
    npm install-scripts approve node opencode-ai && npm rebuild

and NODE_AGENTS names the directory where that was done. `pytest -s` prints the tokens of each request."""
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from clients import ROOT, program

pytestmark = pytest.mark.clients
NODE_AGENTS = Path(os.environ.get("NODE_AGENTS", "."))
PATH = f"{NODE_AGENTS / 'node_modules/.bin'}{os.pathsep}{os.environ['PATH']}"
CONTEXT = 2**17     # in the embedded tokenizer's tokens: 3 of them are as long as one of a large model


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server whose replies end soon, but not at once; and so do strings in them."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=CONTEXT, eos_token_id=511, bos_token_id=None))
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
        torch.nn.init.normal_(matrix, std=0.2)
    tokenizer = Tokenizer.from_file(str(ROOT / "tiny_chat/tokenizer.json"))
    quote, end, begin = map(tokenizer.token_to_id, ('"', "<|end|>", "<|assistant|>"))
    with torch.no_grad():
        model.lm_head.weight[[quote, end]] *= 4
        model.model.embed_tokens.weight[begin] = -model.lm_head.weight[end]
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "tiny_chat" / name, directory)
    with program(directory, ":memory:", "--gpu-cache-tokens", str(2 * CONTEXT),
                 "--cpu-cache-tokens", "0") as (_, url, _):
        yield url


# ---- between an agent and the server

class Exchange(NamedTuple):
    """A request and its answer."""
    messages: list[dict]        # or items
    tools: list[str]
    prompt: int                 # tokens, of these
    cached: int
    generated: int


@contextmanager
def relay(url, tool):
    """Passes all on. But where a user has the last word and `tool` is offered, the model must call it:
    random weights would not. Yields the relay's URL, and a list of exchanges that grows."""
    class Relay(BaseHTTPRequestHandler):
        def do_GET(self):
            self.pass_on(b"")

        def do_POST(self):
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, body):
            asked = json.loads(body or "{}")
            messages = asked.get("messages") or asked.get("input") or [{}]
            names = [offered.get("function", offered).get("name") for offered in asked.get("tools", ())]
            if tool in names and messages[-1].get("role") == "user":
                named = dict(function=dict(name=tool)) if "messages" in asked else dict(name=tool)
                body = json.dumps(asked | dict(tool_choice=dict(type="function", **named))).encode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            headers |= {"content-length": len(body)} if body else {}
            upstream = http.client.HTTPConnection(urlsplit(url).netloc)
            upstream.request(self.command, self.path, body, headers)
            answer, content = upstream.getresponse(), b""
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type"))
            self.end_headers()
            while piece := answer.read1():
                content += piece
                self.wfile.write(piece)
            assert answer.status == 200, (body[:500], content)
            if asked:
                counts = [int(re.findall(rb'"%b": (\d+)' % name, content)[-1]) for name in
                          (b"(?:prompt|input)_tokens", b"cached_tokens", b"(?:completion|output)_tokens")]
                exchanges.append(Exchange(messages, names, *counts))

        def log_message(self, *_):
            pass

    exchanges = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", exchanges
        finally:
            server.shutdown()


def runs(command, directory, **environment):
    """What it prints. Its home is the directory."""
    if not shutil.which(command[0], path=PATH):
        pytest.skip(f"{command[0]} is neither in the directory that NODE_AGENTS names nor on PATH")
    here = dict(HOME=str(directory), PWD=str(directory))
    environment = os.environ | here | dict(PATH=PATH) | environment
    done = subprocess.run(command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- agents that are commands

class Agent(NamedTuple):
    """tool: a harmless one of it. first, more: the commands that say a first message and the next
    ones. In its file and its variables SERVER stands for the server's URL."""
    tool: str
    first: str
    more: str
    file: str = "unused"
    content: str = ""
    variables: dict[str, str] = {}


AGENTS = {
    "opencode": Agent(
        "glob", "opencode run", "opencode run --continue", "opencode.json",
        """{"autoupdate": false, "model": "ours/tiny", "provider": {"ours": {
            "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "SERVER", "apiKey": "none"},
            "models": {"tiny": {"limit": {"context": 131072, "output": 4096}}}}}}""",
        dict(OPENCODE_DISABLE_MODELS_FETCH="1")),
    "codex": Agent(
        "get_goal", "codex exec --skip-git-repo-check", "codex exec resume --skip-git-repo-check --last",
        ".codex/config.toml",
        """model = "tiny"
model_provider = "ours"
[model_providers.ours]
name = "ours"
base_url = "SERVER"
wire_api = "responses"
"""),
    "qwen": Agent(
        "glob", "qwen --auth-type openai", "qwen --auth-type openai --continue",
        variables=dict(OPENAI_API_KEY="none", OPENAI_BASE_URL="SERVER", OPENAI_MODEL="tiny")),
    "cn": Agent(
        "List", "cn --config config.yaml -p", "cn --config config.yaml -p --resume", "config.yaml",
        """name: ours
version: 1.0.0
schema: v1
models:
  - {name: tiny, provider: openai, model: tiny, apiBase: "SERVER", apiKey: none, capabilities: [tool_use]}
""",
        dict(CONTINUE_TELEMETRY_ENABLED="0"))}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_calls_a_tool_and_finds_its_context_cached(name, url, tmp_path):
    """Three messages, each in a process of its own. The cache lacks no more of a request than the text
    behind what it has in common with the request before. (A token is a byte at least.)"""
    agent = AGENTS[name]
    with relay(url, agent.tool) as (relayed, exchanges):
        file = tmp_path / agent.file
        file.parent.mkdir(exist_ok=True)
        file.write_text(agent.content.replace("SERVER", relayed))
        variables = {key: value.replace("SERVER", relayed) for key, value in agent.variables.items()}
        for turn in range(3):
            command = agent.more if turn else agent.first
            runs([*command.split(), f"Message {turn}"], tmp_path, **variables)
    # (In others it asks for a title, or for what it should remember.)
    tools = next(exchange.tools for exchange in exchanges if agent.tool in exchange.tools)
    main = [exchange for exchange in exchanges if exchange.tools == tools]
    print(f"\n{runs([name, '--version'], tmp_path).strip()}: "
          + ", ".join(f"{one.cached:,} of {one.prompt:,}" for one in main),
          f"and {len(exchanges) - len(main)} other requests")
    assert len(main) == 6
    for called in main[1::2]:
        call, result = called.messages[-2:]
        made, = call.get("tool_calls", [call])
        assert made.get("function", made)["name"] == agent.tool
        ids = made.get("call_id") or made["id"], result.get("call_id") or result["tool_call_id"]
        assert ids[0] == ids[1] and ids[0].startswith("call_")
    for before, now in zip(main, main[1:]):
        old, new = json.dumps(before.messages)[:-1], json.dumps(now.messages)
        common = len(os.path.commonprefix([old, new]))
        assert now.prompt - now.cached <= len(new) - common + 32
        # codex has nothing stored: the ids of its replies are found if their text is cut up alike
        if common == len(old) and name != "codex":
            assert now.cached == before.prompt + before.generated - 1


# ---- the Vercel AI SDK

VERCEL = """
import { createRequire } from "module";
const require = createRequire(process.argv[2] + "/x.js");
const load = (name) => import(require.resolve(name));
const { generateText, streamText, generateObject, tool, stepCountIs } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");
const [url, kind] = process.argv.slice(3);
const options = { name: "ours", baseURL: url, apiKey: "none",
                  includeUsage: true, supportsStructuredOutputs: true };
const model = { compatible: () => createOpenAICompatible(options)("tiny"),
                chat: () => createOpenAI(options).chat("tiny"),
                responses: () => createOpenAI(options)("tiny") }[kind]();
const digit = z.int().min(0).max(9);
const add = tool({ description: "Adds.", inputSchema: z.object({ a: digit, b: digit }),
                   execute: async ({ a, b }) => a + b });
const asked = { model, tools: { add }, maxOutputTokens: 300, system: `Be ${kind}.`, stopWhen: stepCountIs(2),
                prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }) };
const generated = await generateText({ ...asked, prompt: "1 + 2?" });
const streamed = streamText({ ...asked, prompt: "3 + 4?" });
await streamed.consumeStream();
const schema = z.object({ name: z.string().max(9), kind: z.enum(["cat", "dog"]),
                          tags: z.array(z.boolean()).max(2) });
const { object } = await generateObject({ model, schema, prompt: "A pet.", maxOutputTokens: 300 });
const steps = (all) => all.map(({ finishReason, toolCalls, toolResults, usage }) => ({
  finishReason, calls: toolCalls.map(({ input }) => input),
  results: toolResults.map(({ output }) => output), prompt: usage.inputTokens,
  cached: usage.inputTokenDetails.cacheReadTokens, total: usage.totalTokens }));
console.log(JSON.stringify({ generated: steps(generated.steps),
                             streamed: steps(await streamed.steps), object }));
"""


@pytest.mark.parametrize("kind", ["compatible", "chat", "responses"])
def test_the_vercel_sdk(url, kind, tmp_path):
    if not (NODE_AGENTS / "node_modules/ai").is_dir():
        pytest.skip("the package `ai` is not in the directory that NODE_AGENTS names")
    (tmp_path / "script.mjs").write_text(VERCEL)
    told = json.loads(runs(["node", "script.mjs", str(NODE_AGENTS.resolve()), f"{url}/v1", kind], tmp_path))
    for first, second in (told["generated"], told["streamed"]):
        assert first["finishReason"] == "tool-calls" and first["calls"]
        assert first["results"] == [call["a"] + call["b"] for call in first["calls"]]
        assert second["cached"] == first["total"] - 1
        print(f"\n{kind}: {first['cached']} of {first['prompt']}, {second['cached']} of {second['prompt']}")
    assert told["object"].keys() == {"name", "kind", "tags"} and told["object"]["kind"] in ("cat", "dog")
