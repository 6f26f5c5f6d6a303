from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from minisgl.base.errors import ModelError, RequestError
from minisgl.base.types import LocalModel
from minisgl.text.tokenizer import TokenizerContext
from minisgl_plugins.tokenizer.hf import HFTokenizer
from minisgl_plugins.tokenizer.template import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi 世界  "},
    {"role": "assistant", "content": "Hello <b>&amp;</b>"},
    {"role": "user", "content": "2 + 2?"},
]
# Written for these tests with what real templates use: loops with break, namespaces, tojson, macros, trimming, tools.
TEMPLATE = """{%- macro line(role, text) %}
<|{{ role }}|>{{ text | trim }}
{%- endmacro %}
{{- bos_token }}
{%- set ns = namespace(users=0) %}
{%- if tools %}
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'user' %}{%- set ns.users = ns.users + 1 %}{%- endif %}
    {%- if message.role == 'assistant' %}
{%- generation %}{{ line(message.role, message.content) }}{%- endgeneration %}
    {%- else %}
{{ line(message.role, message.content) }}
    {%- endif %}
    {%- if message.role == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- if flag is defined %} flag={{ flag }}{% endif %}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif %} {{ ns.users }} {{ {'k': 'é<'} | tojson(indent=1) }}"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object", "properties": {}}},
    }
]


def alphabet() -> dict[str, int]:
    return {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def save(path: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return path


def byte_level(path: Path, bos_by_processor: bool = False, **config: Any) -> Path:
    """Bytes, "<s>" 256, "</s>" 257 special, "<tool>" 258 added but not special."""
    tokenizer = Tokenizer(BPE(vocab=alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>世", special=False)])
    if bos_by_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return save(path, tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **config})


def sentencepiece_like(path: Path) -> Path:
    """The layout of Llama 2 and Mistral: "▁" for spaces, bytes for what the vocabulary lacks, a leading space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return save(path, tokenizer, bos_token="<s>", eos_token="</s>")


def load(path: Path, template: str | None = None) -> HFTokenizer:
    return HFTokenizer(TokenizerContext(HFTokenizer.Settings(), path, template))


# ------------------------------------------------------------------------------------------------ ids


def test_a14_bos_comes_once_however_it_is_asked_for(tmp_path: Path) -> None:
    for i, (processor, config) in enumerate(
        [(True, {}), (False, {"add_bos_token": True}), (True, {"add_bos_token": True})]
    ):
        t = load(byte_level(tmp_path / str(i), processor, **config))
        assert t.encode("hi", True).tolist()[0] == 256
        assert t.encode("hi", True).tolist().count(256) == 1
        assert t.encode("<s>hi", True).tolist().count(256) == 1
        assert t.encode("hi", False).tolist().count(256) == 0
        assert t.encode("<s>hi", False).tolist().count(256) == 1


def test_a14_no_bos_where_the_config_says_so(tmp_path: Path) -> None:
    t = load(byte_level(tmp_path / "t", True, add_bos_token=False))
    assert 256 not in t.encode("hi", True).tolist()
    assert t.encode("<s>hi", True).tolist().count(256) == 1


def test_special_tokens_of_the_config(tmp_path: Path) -> None:
    t = load(byte_level(tmp_path / "t", eos_token={"content": "</s>", "__type": "AddedToken"}))
    assert (t.bos, t.eos, t.vocab) == (256, frozenset({257}), 259)
    assert t.token_to_id("</s>") == 257
    assert t.token_to_id("nope") is None


def test_special_tokens_map_is_the_fallback(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t", bos_token=None)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["bos_token"], config["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    assert (load(path).bos, load(path).eos) == (256, frozenset({257}))


def test_truncation_left_in_the_file_is_off(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path / "tokenizer.json"))
    assert len(load(path).encode("a" * 30, False)) == 30
    assert len(load(path).encode("a", False)) == 1


def test_longest_token_bounds_the_characters(tmp_path: Path, smollm2: LocalModel) -> None:
    assert load(byte_level(tmp_path / "t")).max_chars == len("<tool>世".encode())
    assert smollm2.tokenizer_dir is not None
    vocab = Tokenizer.from_file(str(smollm2.tokenizer_dir / "tokenizer.json")).get_vocab()
    assert load(smollm2.tokenizer_dir).max_chars == max(map(len, vocab))
    assert load(word_piece(tmp_path / "w")).max_chars is None


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizers library"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------ text


def word_piece(path: Path) -> Path:
    vocab = {w: i for i, w in enumerate(["[UNK]", "[SEP]", "play", "##ing", "the", "world", "."])}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return save(path, tokenizer)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 259), max_size=30), skip=st.booleans())
def test_a3_byte_level_pieces_join_to_what_the_library_decodes(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "byte-level"
    t = load(path if path.exists() else byte_level(path))
    decoder = t.decoder(skip)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.finish()
    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert text == reference.decode(ids, skip_special_tokens=skip) == t.decode(ids, skip)


@settings(deadline=None, max_examples=150)
@given(prompt=st.text("ab c世", min_size=1, max_size=8), out=st.text("ab c世👩é", max_size=10))
def test_a3_sentencepiece_output_continues_the_prompt(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, out: str
) -> None:
    """The leading space of a continuation stays, no text of the prompt comes again."""
    path = tmp_path_factory.getbasetemp() / "sentencepiece"
    t = load(path if path.exists() else sentencepiece_like(path))
    prompt_ids, ids = t.encode(prompt, False).tolist(), t.encode(out, False).tolist()
    decoder = t.decoder(True)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.finish()
    assert t.decode(prompt_ids, True) == prompt
    assert t.decode(prompt_ids + ids, True) == prompt + text


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 6), max_size=40), skip=st.booleans())
def test_a3_word_piece_pieces_join_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "word-piece"
    t = load(path if path.exists() else word_piece(path))
    decoder = t.decoder(skip)
    assert "".join([decoder.push([i]) for i in ids]) + decoder.finish() == t.decode(ids, skip)


def test_special_tokens_are_skipped_but_added_ones_kept(tmp_path: Path) -> None:
    t = load(byte_level(tmp_path / "t"))
    assert t.decode([256, 258, 257], True) == "<tool>世"
    assert t.decode([256, 258, 257], False) == "<s><tool>世</s>"


# ------------------------------------------------------------------------------------------------ templates


def reference(path: Path, template: str | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(path)
    if template is not None:
        loaded.chat_template = template
    return loaded


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendered_text_is_that_of_transformers(tmp_path: Path, generation: bool, tools: Any) -> None:
    path = byte_level(tmp_path / "t", chat_template=TEMPLATE)
    kw = {"tools": tools, "add_generation_prompt": generation, "flag": 3}
    assert load(path).render(CHAT, **kw) == reference(path).apply_chat_template(CHAT, tokenize=False, **kw)


@pytest.mark.parametrize("generation", [True, False])
def test_default_model_renders_as_transformers_does(smollm2: LocalModel, generation: bool) -> None:
    path = smollm2.tokenizer_dir
    assert path is not None
    ours, theirs = load(path), reference(path)
    for chat in (CHAT, CHAT[1:], CHAT[1:2]):
        text = ours.render(chat, add_generation_prompt=generation)
        assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
        ids = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=generation, return_dict=False)
        assert ours.encode(text, False).tolist() == ids


@pytest.mark.parametrize("last", ["The answer is", "trailing space ", ""])
@pytest.mark.parametrize(
    "template", [TEMPLATE, "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"]
)
def test_continued_message_ends_as_in_transformers(tmp_path: Path, template: str, last: str) -> None:
    path = byte_level(tmp_path / "t", chat_template=template)
    chat = [*CHAT[:2], {"role": "assistant", "content": last}]
    ours = load(path).render(chat, continue_final_message=True)
    assert ours == reference(path).apply_chat_template(
        chat, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )


def test_generation_prompt_is_added_unless_a_message_is_continued(tmp_path: Path) -> None:
    t = load(byte_level(tmp_path / "t", chat_template=TEMPLATE))
    assert "<|assistant|>" in t.render(CHAT[:2])
    with pytest.raises(RequestError, match="cannot both be true"):
        t.render(CHAT, continue_final_message=True, add_generation_prompt=True)


def test_m18_template_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t", chat_template="from config")
    assert load(path).render(CHAT) == "from config"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(path).render(CHAT) == "from json"
    (path / "chat_template.jinja").write_text("from jinja")
    assert load(path).render(CHAT) == "from jinja"
    assert load(path, "from the setting").render(CHAT) == "from the setting"


def test_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    t = load(byte_level(tmp_path / "t", chat_template=named))
    assert t.render(CHAT) == "plain"
    assert t.render(CHAT, tools=TOOLS) == "with tools"


def test_refusals_carry_the_templates_message(tmp_path: Path) -> None:
    t = load(byte_level(tmp_path / "t", chat_template=TEMPLATE))
    with pytest.raises(RequestError, match="roles must alternate") as e:
        t.render([{"role": "bad", "content": "x"}])
    assert (e.value.status, e.value.code, e.value.param) == (400, "invalid_value", "messages")
    with pytest.raises(RequestError):
        load(byte_level(tmp_path / "v", chat_template="{{ messages[0].content + 1 }}")).render(CHAT)
    with pytest.raises(RequestError, match="no chat template"):
        load(byte_level(tmp_path / "u")).render(CHAT)


def test_template_that_is_not_jinja_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"line 2.*model\.chat_template"):
        load(byte_level(tmp_path / "t", chat_template="a\n{% for x %}"))


def test_messages_are_made_what_templates_expect() -> None:
    t = ChatTemplate({"default": "{{ messages | tojson }}"}, {})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "reasoning": "hm"},
    ]
    first, second = json.loads(t.render(chat))
    assert first == {"role": "system", "content": "a\nb"}
    assert "content" not in second
    assert [c["function"]["arguments"] for c in second["tool_calls"]] == [{"a": 1}, "{broken"]
    assert (second["reasoning"], second["reasoning_content"]) == ("hm", "hm")


def test_text_parts_stay_for_templates_that_take_them() -> None:
    source = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate({"default": source}, {}).render(chat) == "<a><b>"
    with pytest.raises(RequestError, match="reads text only"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate({"default": source}, {}).render(CHAT)
