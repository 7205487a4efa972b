"""Other people's agents, as they are: they call a function, send its result back, and go on.

The model has random weights, so what it says is noise; `tool_choice` makes it call. An agent that leaves the
choice to the model gets a reply of ours (clients.Script) in the place of the first one.

    pytest tests/test_agents.py -m clients -s       prints the table: agent, version, prompt and cached tokens

Invariant: in every turn but the first, all tokens that were fed before are cached."""
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
from pydantic import BaseModel, ConfigDict, TypeAdapter

from clients import Script, make_noise, serving
from serving.sessions import Sessions

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
CONTEXT = 2**15
Room = Literal["single", "double"]
QUESTION = "Book a room in Zürich for three nights."


class Booking(BaseModel):
    """What was booked."""
    model_config = ConfigDict(extra="forbid")
    city: str
    nights: int
    room: Room


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "noise"
    make_noise(directory, CONTEXT)
    return lambda: Sessions(directory, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=0)


@pytest.fixture(scope="module")
def server(sessions):
    with serving(sessions()) as server:
        yield server


@pytest.fixture
def base_url(server, monkeypatch):
    """For agents that look for it in the environment, too."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
    return server.url + "/v1"


@pytest.fixture
def calls():
    """The arguments of every call of `book`, each in the types that the schema asks for."""
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
        arguments = dict(city=city, nights=nights, room=room)
        TypeAdapter(Booking).validate_python(arguments, strict=True)
        calls.append(arguments)
        return f"Booked, number {len(calls)}."
    return book


@contextmanager
def agent(server, name, package, turns=2, lost=0):
    """An agent at work, in that many turns at least: a row of the table.

    lost: tokens of the turn before that may have to be computed again, besides its last one, which was
    never fed."""
    server.recent_turns.clear()
    yield
    done = list(server.recent_turns)
    cached = [turn["gpu"] + turn["cpu"] for turn in done]
    print(f"\n| {name} | {package} {metadata.version(package)} | "
          + " · ".join(f"{turn['prompt_tokens']}/{hit}" for turn, hit in zip(done, cached)) + " |")
    assert len(done) >= turns
    for (before, turn), hit in zip(pairwise(done), cached[1:]):
        assert hit >= before["prompt_tokens"] + before["completion_tokens"] - 1 - lost


# ---- openai-agents

def openai_agent(kind, base_url, book, **options):
    """Its first request must call a function; after that it asks for "auto" by itself."""
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    model = getattr(agents, kind)("noise", openai.AsyncOpenAI(base_url=base_url, api_key="none"))
    settings = agents.ModelSettings(tool_choice="required")
    return agents.Agent(name="one", instructions=f"Be {kind}.", tools=[agents.function_tool(book)],
                        model=model, model_settings=settings, **options)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(server, base_url, book, calls, kind):
    one = openai_agent(kind, base_url, book)
    import agents
    quiet = agents.RunConfig(tracing_disabled=True)
    with agent(server, f"openai-agents, {kind}", "openai-agents"):
        result = agents.Runner.run_sync(one, QUESTION, run_config=quiet)
    assert len(calls) == 1 and result.final_output


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_stream(server, base_url, book, calls, kind):
    one = openai_agent(kind, base_url, book)
    import agents
    quiet = agents.RunConfig(tracing_disabled=True)

    async def run():
        result = agents.Runner.run_streamed(one, QUESTION, run_config=quiet)
        return [event async for event in result.stream_events()], result.final_output
    with agent(server, f"openai-agents, {kind}, stream", "openai-agents"):
        events, output = asyncio.run(run())
    assert len(calls) == 1 and output


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_with_an_output_type(server, base_url, book, calls, kind):
    one = openai_agent(kind, base_url, book, output_type=Booking)
    import agents
    quiet = agents.RunConfig(tracing_disabled=True)
    with agent(server, f"openai-agents, {kind}, output type", "openai-agents"):
        result = agents.Runner.run_sync(one, QUESTION, run_config=quiet)
    assert len(calls) == 1 and isinstance(result.final_output, Booking)


# ---- pydantic-ai

def pydantic_agent(kind, base_url, book, choices, **options):
    """choices: the tool_choice of each request."""
    library = pytest.importorskip("pydantic_ai")
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    class Choose(AbstractCapability):
        def get_model_settings(self):
            return lambda context: dict(tool_choice=choices[context.run_step - 1])
    model = getattr(openai, kind)("noise", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    return library.Agent(model, instructions=f"Be {kind}.", tools=[book], capabilities=[Choose()],
                         **options)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server, base_url, book, calls, kind):
    one = pydantic_agent(kind, base_url, book, ["required", "auto"])
    with agent(server, f"pydantic-ai, {kind}", "pydantic-ai-slim"):
        result = one.run_sync(QUESTION)
    assert len(calls) == 1 and result.output


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_with_an_output_type(server, base_url, book, calls, kind):
    """Which is a function for it. Without a choice of ours it asks for "required"."""
    one = pydantic_agent(kind, base_url, book, [["book"], "auto"], output_type=Booking)
    with agent(server, f"pydantic-ai, {kind}, output type", "pydantic-ai-slim"):
        result = one.run_sync(QUESTION)
    assert len(calls) >= 1 and isinstance(result.output, Booking)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_with_a_native_output_type(server, base_url, book, calls, kind):
    """A response_format."""
    library = pytest.importorskip("pydantic_ai")
    one = pydantic_agent(kind, base_url, book, ["required", "auto"],
                         output_type=library.NativeOutput(Booking))
    with agent(server, f"pydantic-ai, {kind}, native output", "pydantic-ai-slim"):
        result = one.run_sync(QUESTION)
    assert len(calls) == 1 and isinstance(result.output, Booking)


# ---- LangGraph

@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "stream"])
def test_langgraph(server, base_url, book, calls, responses, streaming):
    """Its ReAct agent asks a second time for the object, without tools."""
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="noise", base_url=base_url, api_key="none", streaming=streaming,
                               use_responses_api=responses)

    def first_the_tool(state, runtime):
        return model.bind_tools([book], tool_choice="auto" if calls else "required")
    one = prebuilt.create_react_agent(first_the_tool, [book], prompt="Be brief.")
    kind = ("Responses" if responses else "chat") + (", stream" if streaming else "")
    with agent(server, f"LangGraph's ReAct, {kind}", "langgraph"):
        result = one.invoke(dict(messages=[("user", QUESTION)]))
    assert len(calls) == 1 and result["messages"][-1].text


# ---- smolagents

def test_smolagents(server, base_url, book, calls):
    """All its requests are "required"; it ends by a call of its own function final_answer."""
    library = pytest.importorskip("smolagents")
    model = library.OpenAIServerModel("noise", api_base=base_url, api_key="none")
    one = library.ToolCallingAgent([library.tool(book)], model, max_steps=6, verbosity_level=0)
    with agent(server, "smolagents, ToolCallingAgent", "smolagents"):
        for n in range(9):
            one.run(f"{n}: {QUESTION}", reset=n == 0)
            if calls:
                break
    assert calls


# ---- instructor

@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server, base_url, mode):
    """When an object does not please it, it sends its reasons and asks again."""
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    from pydantic import field_validator
    tried = []

    class Picky(Booking):
        @field_validator("nights")
        def twice(cls, nights):
            tried.append(nights)
            if len(tried) < 2:
                raise ValueError("fewer nights, please")
            return nights
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"),
                                    mode=getattr(instructor.Mode, mode))
    with agent(server, f"instructor, {mode}", "instructor"):
        found = client.chat.completions.create(
            model="noise", response_model=Picky, max_retries=2,
            messages=[dict(role="user", content=QUESTION)])
    assert isinstance(found, Booking) and len(tried) == 2


# ---- llm

@pytest.fixture
def llm(tmp_path):
    """The program, with its own files."""
    pytest.importorskip("llm")
    environment = os.environ | dict(LLM_LOAD_PLUGINS="", LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")

    def run(server, *arguments):
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: ours\n  model_name: noise\n  api_base: {server.url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n")
        command = [sys.executable, "-m", "llm", "-m", "ours", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout
    return run


def test_llm_with_a_schema(server, llm):
    schema = json.dumps(Booking.model_json_schema())
    with agent(server, "llm --schema", "llm"):
        Booking.model_validate_json(llm(server, "--schema", schema, QUESTION))
        Booking.model_validate_json(llm(server, "--continue", "--schema", schema, "And Genève?"))


def test_llm_with_a_function(sessions, llm):
    """It leaves the choice to the model, so the replies are ours."""
    ours = sessions()
    script = Script(ours)
    script.replies += ['<tool_call>{"name": "add", "arguments": {"b":20,"a":1}}</tool_call>', "It is 21."]
    code = "def add(a: int, b: int) -> int:\n    return a + b"
    with serving(ours) as server, agent(server, "llm --functions", "llm"):
        assert llm(server, "--functions", code, "1 + 20?").endswith("It is 21.\n")
