"""Other people's agents, as they are: each calls a function of ours, sends its result back, and goes
on.

The model has random weights, so a call is noise of the right form (clients.make_noise).
`tool_choice` makes the model call; an agent that leaves the choice to the model gets replies of
ours instead (clients.Script).

    pytest tests/test_agents.py -m clients -s       prints the table of agents at its end

Invariant: in every turn but the first, all tokens that were fed before are cached, as far as the
agent sends them again."""
import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from clients import Script, make_noise, serving, user
from serving.sessions import Sessions

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
CONTEXT = 2**15
QUESTION = "Book a room in Zürich for three nights."
Room = Literal["single", "double"]


class Booking(BaseModel):
    """What was booked."""
    model_config = ConfigDict(extra="forbid", strict=True)
    city: str
    nights: int
    room: Room


@pytest.fixture(scope="module")
def open_sessions(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "noise"
    make_noise(directory, CONTEXT)
    return lambda: Sessions(directory, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=0)


@pytest.fixture(scope="module")
def server(open_sessions):
    with serving(open_sessions()) as server:
        yield server


@pytest.fixture
def endpoint(server):
    return dict(base_url=server.url + "/v1", api_key="none")


@pytest.fixture
def calls():
    """What `book` was called with."""
    return []


@pytest.fixture
def book(calls):
    def book(city: str, nights: int, room: Room) -> str:
        """Books a room.

        Args:
            city: where
            nights: how many
            room: how large
        """
        calls.append(Booking(city=city, nights=nights, room=room))
        return f"Booked, number {len(calls)}."
    return book


# ---- the table

@pytest.fixture(scope="module")
def rows():
    rows = []
    yield rows
    head = "| agent | version | works | prompt/cached tokens by turn |", "|---|---|---|---|"
    print("\n", *head, *rows, sep="\n")


@pytest.fixture
def at_work(rows):
    """at_work(server, name, package): an agent takes some turns, and gets a row in the table."""
    @contextmanager
    def at_work(server, name, package, resends_reply=True, lost=0):
        """lost: tokens at the prompt's end, such as <|assistant|>, that are not in the next one."""
        server.recent_turns.clear()
        works = "no"
        try:
            yield
            works = "yes"
        finally:
            turns = [(turn["prompt_tokens"], turn["gpu"] + turn["cpu"], turn["completion_tokens"])
                     for turn in server.recent_turns]
            listed = " · ".join(f"{prompt:,}/{cached:,}" for prompt, cached, _ in turns)
            rows.append(f"| {name} | {package} {metadata.version(package)} | {works} | {listed} |")
        assert len(turns) > 1
        for (prompt, _, completion), (_, cached, _) in pairwise(turns):
            assert cached >= prompt + (completion - 1 if resends_reply else -lost)
    return at_work


# ---- openai-agents

CHAT, RESPONSES = "OpenAIChatCompletionsModel", "OpenAIResponsesModel"


def openai_agent(kind, endpoint, book, **options):
    """Its first request is "required"; then it asks for "auto" by itself."""
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("noise", openai.AsyncOpenAI(**endpoint))
    settings = agents.ModelSettings(tool_choice="required")
    return agents.Agent(name="one", tools=[agents.function_tool(book)], model=model,
                        model_settings=settings, **options)


@pytest.mark.parametrize("kind", [CHAT, RESPONSES])
def test_openai_agents(server, endpoint, book, calls, at_work, kind):
    agent = openai_agent(kind, endpoint, book, instructions=f"Be {kind}.")
    import agents
    with at_work(server, f"openai-agents, {kind}", "openai-agents"):
        assert isinstance(agents.Runner.run_sync(agent, QUESTION).final_output, str)
    assert calls


@pytest.mark.parametrize("kind", [CHAT, RESPONSES])
def test_openai_agents_stream(server, endpoint, book, calls, at_work, kind):
    agent = openai_agent(kind, endpoint, book, instructions=f"Stream {kind}.")
    import agents

    async def run():
        result = agents.Runner.run_streamed(agent, QUESTION)
        kinds = {event.type async for event in result.stream_events()}
        return result.final_output, kinds
    with at_work(server, f"openai-agents, {kind}, streaming", "openai-agents"):
        output, kinds = asyncio.run(run())
    assert calls and isinstance(output, str) and "raw_response_event" in kinds


@pytest.mark.parametrize("kind", [CHAT, RESPONSES])
def test_openai_agents_with_an_output_type(server, endpoint, book, calls, at_work, kind):
    agent = openai_agent(kind, endpoint, book, instructions=f"Type {kind}.", output_type=Booking)
    import agents
    with at_work(server, f"openai-agents, {kind}, output_type", "openai-agents"):
        assert isinstance(agents.Runner.run_sync(agent, QUESTION).final_output, Booking)
    assert calls


# ---- pydantic-ai

def pydantic_agent(kind, endpoint, book, choices, **options):
    """choices: the tool_choice of each request."""
    library = pytest.importorskip("pydantic_ai")
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    class Choose(AbstractCapability):
        def get_model_settings(self):
            return lambda context: dict(tool_choice=choices[context.run_step - 1])
    model = getattr(openai, kind)("noise", provider=OpenAIProvider(**endpoint))
    return library.Agent(model, tools=[book], capabilities=[Choose()], **options)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server, endpoint, book, calls, at_work, kind):
    agent = pydantic_agent(kind, endpoint, book, ["required", "auto"], instructions=f"Be {kind}.")
    with at_work(server, f"pydantic-ai, {kind}", "pydantic-ai-slim"):
        assert isinstance(agent.run_sync(QUESTION).output, str)
    assert calls


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_with_an_output_type(server, endpoint, book, calls, at_work, kind):
    """It makes the type a function."""
    agent = pydantic_agent(kind, endpoint, book, [["book"], ["final_result"]], output_type=Booking,
                           instructions=f"Type {kind}.")
    with at_work(server, f"pydantic-ai, {kind}, output_type", "pydantic-ai-slim"):
        assert isinstance(agent.run_sync(QUESTION).output, Booking)
    assert calls


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_with_a_native_output_type(server, endpoint, book, calls, at_work, kind):
    """It sends the type's schema as the form of the reply."""
    native = pytest.importorskip("pydantic_ai").NativeOutput(Booking)
    agent = pydantic_agent(kind, endpoint, book, ["required", "none"], output_type=native,
                           instructions=f"Form {kind}.")
    with at_work(server, f"pydantic-ai, {kind}, NativeOutput", "pydantic-ai-slim"):
        assert isinstance(agent.run_sync(QUESTION).output, Booking)
    assert calls


# ---- LangGraph

@pytest.mark.parametrize("way", ["chat", "chat, streaming", "Responses", "Responses, streaming"])
def test_langgraph(server, endpoint, book, calls, at_work, way):
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="needs langgraph")
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="noise", streaming="streaming" in way,
                               use_responses_api="Responses" in way, **endpoint)

    def choose(state, runtime):
        return model.bind_tools([book], tool_choice="auto" if calls else "required")
    agent = prebuilt.create_react_agent(choose, [book], prompt=f"Be brief, {way}.")
    with at_work(server, f"LangGraph's ReAct agent, {way}", "langgraph"):
        said = agent.invoke(dict(messages=[("user", QUESTION)]))["messages"][-1]
    assert said.type == "ai" and not said.tool_calls
    assert calls


# ---- smolagents

def test_smolagents(server, endpoint, book, calls, at_work):
    """All its requests are "required"; it ends by a call of its function final_answer. It writes its
    calls anew, as Python in plain text, and appends its errors to the user's last message, which
    moves <|end|><|assistant|>."""
    library = pytest.importorskip("smolagents")
    model = library.OpenAIModel("noise", api_base=endpoint["base_url"], api_key="none")
    agent = library.ToolCallingAgent([library.tool(book)], model, max_steps=100, verbosity_level=0)
    with at_work(server, "smolagents' ToolCallingAgent", "smolagents", resends_reply=False, lost=2):
        while not calls:
            for _ in agent.run(QUESTION, reset=False, stream=True):
                if calls and len(server.recent_turns) > 1:
                    break


# ---- autogen

def test_autogen(server, endpoint, book, calls, at_work):
    agents = pytest.importorskip("autogen_agentchat.agents", reason="needs autogen_agentchat")
    openai = pytest.importorskip("autogen_ext.models.openai", reason="needs autogen_ext")
    info = dict(vision=False, function_calling=True, json_output=True, structured_output=True,
                family="unknown")
    model = openai.OpenAIChatCompletionClient(model="noise", model_info=info,
                                              extra_body=dict(tool_choice="required"), **endpoint)
    agent = agents.AssistantAgent("ada", model, tools=[book], system_message="Be brief.",
                                  max_tool_iterations=3)
    with at_work(server, "autogen's AssistantAgent", "autogen-agentchat"):
        asyncio.run(agent.run(task=QUESTION))
    assert len(calls) >= 3


# ---- instructor

@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server, endpoint, at_work, mode):
    """It does not like the first object, says why, and asks again. With Responses it leaves our reply
    out: its words stand in the place of <|assistant|>."""
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    from pydantic import field_validator
    tried = []

    class Picky(Booking):
        @field_validator("nights")
        def fewer(cls, nights):
            tried.append(nights)
            if len(tried) < 2:
                raise ValueError("fewer nights, please")
            return nights
    client = instructor.from_openai(openai.OpenAI(**endpoint), mode=getattr(instructor.Mode, mode))
    resends = mode != "RESPONSES_TOOLS"
    with at_work(server, f"instructor, {mode}", "instructor", resends_reply=resends, lost=1):
        found = client.chat.completions.create(
            model="noise", response_model=Picky, max_retries=2, messages=[user(f"{mode}! {QUESTION}")])
        assert isinstance(found, Booking) and len(tried) == 2


# ---- llm

@pytest.fixture
def llm(tmp_path, monkeypatch):
    """llm(server, ...): what the program prints."""
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")      # llm reads it once: test_other_clients.py imports it, too
    pytest.importorskip("llm")
    environment = os.environ | dict(LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")

    def llm(server, *arguments):
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: ours\n  model_name: noise\n  api_base: {server.url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n")
        command = [sys.executable, "-m", "llm", "-m", "ours", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout
    return llm


def test_llm_with_a_schema(server, llm, at_work):
    schema = json.dumps(Booking.model_json_schema())
    with at_work(server, "llm --schema", "llm"):
        for words in [QUESTION], ["And Genève?", "--continue"]:
            Booking.model_validate_json(llm(server, "--schema", schema, *words))


def test_llm_with_a_function(open_sessions, llm, at_work):
    sessions = open_sessions()
    Script(sessions).replies += [
        '<tool_call>{"name": "add", "arguments": {"b":20,"a":1}}</tool_call>', "It is 21."]
    code = "def add(a: int, b: int) -> int:\n    print(a + b)\n    return a + b"
    with serving(sessions) as server, at_work(server, "llm --functions", "llm"):
        assert llm(server, "--functions", code, "1 + 20?") == "21\nIt is 21.\n"
