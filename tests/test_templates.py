"""Chat templates of many kinds: the context is what the template shows, in every turn.

Oracle: transformers' apply_chat_template over the visible messages."""
import json
import random
from contextlib import closing
from datetime import datetime

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import serving.tokenizer
from scheduler import TooLong
from serving.history import History
from serving.sessions import Sessions
from serving.tokenizer import Rewritten, compile_template, load_tokenizer

SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
NAMED = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
BEGINS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def each(body, asks=BEGINS):
    return "{% for m in messages %}" + body + "{% endfor %}" + asks


REST = ("{% set system = messages[0].content if messages[0].role == 'system' %}"
        "{% set rest = messages[1:] if system else messages %}")
STRIPS = ("{% set said = m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content %}"
          "{{ '<|' + m.role + '|>' + said + '<|end|>' }}")
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    "chatml": each("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}",
                   "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"),
    "trims": each("{{ '<|' + m.role + '|>' }}\n{{ m.content | trim }}{{ '<|end|>' }}\n"),
    "system in the first": REST + "{% for m in rest %}{{ '<|' + m.role + '|> ' }}"
        "{{ system + '//' if system and loop.first }}{{ m.content.strip() }}{{ ' <|end|>' }}{% endfor %}",
    "system in the last": REST + "{% for m in rest %}{{ '<|' + m.role + '|>' }}"
        "{{ system + '//' if system and loop.last }}{{ m.content + '<|end|>' }}{% endfor %}" + BEGINS,
    "strips thoughts": each(STRIPS),
    "begins a thought": each(STRIPS, "{{ '<|assistant|><think>' }}"),
    "an empty thought": each(STRIPS, "{{ '<|assistant|><think></think>' }}"),
    "thoughts at the beginning only": each(
        "{% set said = m.content.split('</think>')[-1] if m.content.startswith('<think>') else m.content %}"
        "{{ '<|' + m.role + '|>' + said + '<|end|>' }}"),
    "numbers": each("{{ loop.index }}" + NAMED),
    "counts all": "{{ messages | length }}" + each(NAMED),
    "counts down": each("{{ loop.revindex }}" + NAMED),
    "only the last": "{{ messages[-1].content }}" + BEGINS,
    "last two": "{% for m in messages[-2:] %}" + NAMED + "{% endfor %}" + BEGINS,
    "no reply": each("{% if m.role != 'assistant' %}" + NAMED + "{% endif %}"),
    "replies twice": each(NAMED + "{{ m.content if m.role == 'assistant' }}"),
    "no beginning": each(NAMED, ""),
    "a line between": each(NAMED + "{{ '\\n' if not loop.last }}"),
    "json": "{{ messages | tojson }}" + BEGINS,
    "json in ascii": each("{{ m | tojson(ensure_ascii=True) }}"),
    "as python writes it": "{{ messages | string }}" + BEGINS,
    "generation": each("{% if m.role == 'assistant' %}{% generation %}" + NAMED
                       + "{% endgeneration %}{% else %}" + NAMED + "{% endif %}"),
    "raises": each("{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + NAMED),
    "shouts": each("{{ '<|' + m.role + '|>' + m.content | upper + '<|end|>' }}"),
    "hides long replies": each("{{ '<|' + m.role + '|>' + m.content[:20] + '<|end|>' }}"),
}


def byte_level(special=SPECIAL):
    """One token for each byte, so a text has one spelling."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return library


def save(directory, template, **config):
    directory.mkdir(exist_ok=True)
    byte_level().save(str(directory / "tokenizer.json"))
    config = dict(eos_token="<|end|>", chat_template=template) | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


ORACLE = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")


def shown(template, messages):
    """What transformers shows."""
    return ORACLE.apply_chat_template(messages, chat_template=template, add_generation_prompt=True,
                                      tokenize=False)


def user(text):
    return dict(role="user", content=text)


def said(text):
    return dict(role="assistant", content=text)


class Played(Sessions):
    """Answers of a script, over no model: `plan` and the history, as turns would use them."""

    def __init__(self, tokenizer):
        self.tokenizer, self.system = tokenizer, []
        self.engine = type("Limits", (), dict(scheduler=type("Limit", (), dict(limit=10**6))))
        self.history = History(":memory:", tokenizer.fingerprint, 10**6)

    def answer(self, reply, messages, conversation=None, closes=True):
        """The text of the context before the reply. The reply is committed."""
        plan = self.plan(messages, conversation)
        ids = self.tokenizer.encode(reply) + [self.tokenizer.special["<|end|>"]] * closes
        after, name = plan.after, conversation or "c"
        turn = self.history.commit(name, after and after.id, plan.prompt, ids, plan.messages, text=reply,
                                   carried=plan.carried, note=plan.note)
        names = {token: text for text, token in self.tokenizer.special.items()}
        context = self.history.tokens(turn.id)[:-len(ids)]
        self.continued = plan.after is not None and not plan.restarts
        pieces = [names[i].encode() if i in names else self.tokenizer.pieces[i] for i in context]
        return b"".join(pieces).decode()


REPLIES = ["Hello", "<think>who?\nhm</think>\n\nYes, you 你好", "a<|end|>b", "x </think> y", "long " * 9,
           "<think></think> No \\ufdd0", '"quoted" \\ and\nlines']


@pytest.mark.parametrize("resends", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_context_is_what_the_template_shows(tmp_path, name, resends):
    template, rng = TEMPLATES[name], random.Random(name)
    tokenizer = save(tmp_path, template)
    strips = name in ("plain", "trims", "system in the first")      # then blanks around a reply differ
    for trial in range(4):
        played, messages = Played(tokenizer), []
        if trial % 2 and name != "raises":
            messages.append(dict(role="system", content="Be brief."))
        for turn in range(5):
            new = messages[:1] if not turn else []
            new = new + [user(rng.choice(["Hi", "And now? <|user|>", "1 + 1", "'é' \\ufdd0"]))]
            before = messages if turn else []
            reply = rng.choice(REPLIES)
            sent, conversation = (before + new, None) if resends else (new, "c")
            closes = name != "plain" and rng.random() < 0.7
            context = played.answer(reply, sent, conversation, closes)
            expected = shown(template, before + new)
            if strips:
                context, expected = "".join(context.split()), "".join(expected.split())
            assert context == expected
            messages = before + new + [said(reply)]


def test_what_goes_on_and_what_starts_anew(tmp_path):
    """Most templates only add text; for them every turn continues the cached context."""
    continues = {}
    for name, template in TEMPLATES.items():
        played = Played(save(tmp_path, template))
        played.answer("Hello", [user("Hi")])
        played.answer("Yes", [user("Hi"), said("Hello"), user("More")])
        continues[name] = played.continued
    assert {name for name, goes_on in continues.items() if not goes_on} == {
        "begins a thought", "an empty thought", "numbers", "counts all", "counts down", "only the last",
        "last two", "no reply", "replies twice", "no beginning", "system in the first", "a line between",
        "json", "json in ascii", "as python writes it", "shouts"}


def test_a_new_date_starts_the_context_anew(tmp_path, monkeypatch):
    played = Played(save(tmp_path, "{{ strftime_now('%d %b') }}" + each(NAMED)))

    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls):
            return datetime(2026, 2, cls.day)
    monkeypatch.setattr(serving.tokenizer, "datetime", Clock)
    messages = [user("Hi")]
    for day, goes_on in (1, False), (1, True), (2, False), (2, True):
        Clock.day = day
        assert played.answer("Hello", messages).startswith(f"0{day} Feb<|user|>")
        assert played.continued == goes_on
        messages = [*messages, said("Hello"), user("More")]


def test_a_rendering_is_expected_to_hold_the_reply(tmp_path):
    ours = save(tmp_path, TEMPLATES["strips thoughts"])
    first = ours.render([], [user("Hi")])
    ours.render([user("Hi"), said(" Yes\n")], [user("More")]).expect(first.digest)
    with pytest.raises(Rewritten, match="in other words"):
        ours.render([user("Hi"), said("<think>so</think>Yes")], [user("More")]).expect(first.digest)
    with pytest.raises(Rewritten, match="in another way"):
        ours.render([user("Hey"), said("Yes")], [user("More")]).expect(first.digest)


def test_a_rendering_is_expected_to_end_where_the_rest_does(tmp_path):
    """A template that adds words because of what the last reply was."""
    extra = "{{ 'EXTRA' if messages[1] and messages[1].content == 'Yes' }}"
    ours = save(tmp_path, each(NAMED, BEGINS + extra))
    first = ours.render([], [user("Hi")])
    ours.render([user("Hi"), said("No")], [user("More")]).expect(first.digest)
    with pytest.raises(Rewritten, match="more words"):
        ours.render([user("Hi"), said("Yes")], [user("More")]).expect(first.digest)


def test_a_date_that_changes_while_a_context_starts_anew(tmp_path, monkeypatch):
    """The context and what we remember of it are one rendering."""
    played = Played(save(tmp_path, "{{ strftime_now('%d %b') }}" + each(NAMED)))

    class Clock(datetime):
        days = iter([1] + [2] * 9)

        @classmethod
        def now(cls):
            return datetime(2026, 2, next(cls.days))
    monkeypatch.setattr(serving.tokenizer, "datetime", Clock)
    assert played.answer("Hello", [user("Hi")]).startswith("01 Feb")
    context = played.answer("Yes", [user("Hi"), said("Hello"), user("More")])
    assert context.startswith("02 Feb") and not played.continued


def test_the_end_of_a_reply_that_a_stop_string_has_cut_to_nothing(tmp_path):
    """A user's message ends with the token that ends a reply: it does not end the reply, too."""
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    played = Played(save(tmp_path, template))
    plan = played.plan([user("Hi")], "c")
    played.history.commit("c", None, plan.prompt, [], plan.messages, text="", carried=plan.carried,
                          note=plan.note)
    assert played.answer("Yes", [user("More")], "c") == "Hi<|end|><|end|>More<|end|>" and played.continued


def test_a_context_that_starts_anew_keeps_the_common_beginning(checkpoint, monkeypatch):
    """Only what differs is computed: here, from the end of the last user's message on."""
    with closing(Sessions(checkpoint, gpu_cache_tokens=512, cpu_cache_tokens=0, chunk_size=4,
                          debug=True)) as sessions:
        template = compile_template(each(NAMED + "{{ '!' if loop.last }}"))
        monkeypatch.setattr(sessions.tokenizer, "_template", template)
        long = user("a long message " * 9)
        first = sessions.respond([long], "c", max_tokens=4, ignore_eos=True).result()
        with pytest.raises(TooLong):                # it may have been shortened: so it is read again
            sessions.respond([user("More")], "c", max_tokens=1000)
        second = sessions.respond([user("More")], "c", max_tokens=4, ignore_eos=True)
        context = sessions.tokenizer.turn([], [long, said(first.text), user("More")], None)
        second.result()
        assert second.plan.restarts
        assert list(sessions.history.tokens(sessions.history.head("c").id))[:-4] == context
        third = sessions.respond([user("More")], "c", max_tokens=4, ignore_eos=True)
        usage, kept = third.result().usage, len(context) - 2        # up to "!" and <|assistant|>
        assert third.plan.restarts and usage["recomputed"] == 0
        assert kept - 4 < usage["gpu"] <= kept


@pytest.mark.parametrize("form", ["", "()", "(ensure_ascii=True)", "(True)", "(indent=2)", "(False, 1)",
                                  "(separators=(',', ':'))", "(sort_keys=True)"])
def test_json_as_transformers(tmp_path, form):
    """Also where repr or JSON escape what guards a special token."""
    template = "{{ messages | tojson" + form + " }}{{ messages | string }}"
    ours = save(tmp_path, template)
    message = user("<|end|> </script> & 'é' \\ufdd0 \"\\\n 你👋\x7f")
    ids = ours.turn([], [message], None)
    assert ours.decode(ids) == shown(template, [message]) and not set(ids) & set(ours.special.values())


def test_generation_as_transformers(tmp_path):
    template = ("{% set x = 1 %}{%- for m in messages -%} {% generation %} \n{% set x = 2 %}{{ m.content }}"
                "{{- x }} {%- endgeneration %} {{ x }}{% endfor %}")
    ours, chat = save(tmp_path, template), [user("Hi")] * 2
    assert ours.decode(ours.turn([], chat, None)) == shown(template, chat)


WHERE = [       # files -> the template, or what is said of them
    (dict(config="A"), "A"), (dict(json="A"), "A"), (dict(config="A", json="B"), "A"),
    (dict(config="A", jinja="B"), "B"), (dict(config=dict(rag="A")), "A"),
    (dict(config=dict(rag="A", default="B")), "B"),
    (dict(config=dict(rag="A", tool_use="B")), "rag, tool_use"),
    (dict(config=dict(rag="A"), jinja="B"), "B"), (dict(rag="A", jinja="B"), "B"), (dict(rag="A"), "A"),
    (dict(rag="A", config="B"), "B"), (dict(rag="A", config=dict(tool_use="B")), "rag, tool_use"),
    (dict(json=dict(rag="A", tool_use="B")), "rag, tool_use")]


@pytest.mark.parametrize("files, expected", WHERE)
def test_every_file_that_may_hold_a_template(tmp_path, files, expected):
    def entry(value):
        if isinstance(value, dict):
            return [dict(name=name, template=source) for name, source in value.items()]
        return value

    (tmp_path / "additional_chat_templates").mkdir()
    for name, value in files.items():
        if name == "jinja":
            (tmp_path / "chat_template.jinja").write_text(value)
        elif name == "json":
            (tmp_path / "chat_template.json").write_text(json.dumps(dict(chat_template=entry(value))))
        elif name != "config":
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(value)
    if len(expected) > 1:
        with pytest.raises(ValueError, match=f"the chat templates {expected}, and none"):
            save(tmp_path, entry(files.get("config")))
    else:
        ours = save(tmp_path, entry(files.get("config")))
        assert ours.decode(ours.turn([], [user("Hi")], None)) == expected
