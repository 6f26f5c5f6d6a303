from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.base.errors import RequestError
from minisgl.base.types import (
    I32,
    Accepted,
    Admit,
    Delta,
    Ended,
    EngineInfo,
    Finish,
    GenerateRequest,
    Refused,
    SamplingParams,
    Tokens,
    Usage,
)
from minisgl.text.decode import ByteDecoder
from minisgl.text.processor import TextProcessor
from minisgl.text.tokenizer import Decoder, Tokenizer
from minisgl.text.validate import check_sampling

BOS, EOS, TURN_END = 256, 257, 258
TABLE = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>", b"<end>"]


class ByteTokenizer(Tokenizer):
    """An id for each byte, and three special tokens."""

    def __init__(self, bos: int | None = BOS) -> None:
        self.vocab, self.eos, self.bos, self.max_chars = 259, frozenset({EOS}), bos, 3
        self.encoded: list[str] = []

    def encode(self, text: str, special: bool) -> I32:
        self.encoded.append(text)
        special = special and self.bos is not None and bool(text)
        return np.array(([self.bos] if special else []) + list(text.encode()), np.int32)

    def render(self, messages: Sequence[Mapping[str, Any]], **kw: Any) -> str:
        if kw.get("fail"):
            raise RequestError("the chat template refused the messages: no", param="messages")
        return "".join(f"[{m['role']}]{m['content']}" for m in messages)

    def decoder(self, skip_special: bool) -> Decoder:
        return ByteDecoder(TABLE[:256] + [b""] * 3 if skip_special else TABLE)

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        decoder = self.decoder(skip_special)
        return decoder.push(ids) + decoder.finish()


INFO = EngineInfo(
    model="m",
    served_names=("m",),
    max_len=64,
    vocab=259,
    eos=(TURN_END,),
    page_size=16,
    num_pages=8,
    max_running=4,
    batch_tokens=64,
    device="cpu",
    dtype="float32",
    created=0,
    defaults={"temperature": 0.5, "top_p": 0.75},
)


def processor(info: EngineInfo = INFO, bos: int | None = BOS) -> TextProcessor:
    return TextProcessor(ByteTokenizer(bos), info, owner=3)


def request(text: str | None = "hi", n: int = 1, **kw: Any) -> GenerateRequest:
    own = {k: kw.pop(k) for k in list(kw) if k in GenerateRequest.__dataclass_fields__}
    return GenerateRequest(text=text, n=n, sampling=SamplingParams(**kw), **own)


def admitted(r: GenerateRequest, info: EngineInfo = INFO, bos: int | None = BOS) -> Admit:
    told, admits = processor(info, bos).submit(range(7, 7 + r.n), r)
    assert isinstance(told[0], Accepted), told
    assert told == [Accepted(7, len(admits[0].ids))]
    return admits[0]


def refused(r: GenerateRequest, info: EngineInfo = INFO, bos: int | None = BOS) -> Refused:
    told, admits = processor(info, bos).submit(range(7, 7 + r.n), r)
    assert admits == []
    (only,) = told
    assert isinstance(only, Refused)
    assert only.uid == 7
    return only


def tokens(pairs: Iterable[tuple[int, int]], step: int = 0) -> Tokens:
    pairs = list(pairs)
    return Tokens(step, np.array([u for u, _ in pairs], np.int64), np.array([t for _, t in pairs], np.int32))


def ended(uid: int, finish: Finish, out: int = 0, cached: int = 0, detail: str = "") -> Ended:
    return Ended(uid, finish, 3, out, cached, detail)


def run(
    ids: Sequence[int], finish: Finish, batch: int = 1, **kw: Any
) -> tuple[str, Delta, list[int], list[Delta], list[int]]:
    """Text, last delta, all ids, all deltas, aborts, of one output that gets ``ids`` in groups of ``batch``."""
    p = processor()
    p.submit([7], request(**kw))
    deltas: list[Delta] = []
    aborts: list[int] = []
    groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    for group in groups:
        told, abort = p.engine_outputs([tokens([(7, t)]) for t in group])
        deltas += told  # type: ignore[arg-type]
        aborts += abort
    told, abort = p.engine_outputs([ended(7, finish, len(ids), 2)])
    deltas += told  # type: ignore[arg-type]
    assert abort == []
    assert [d.finish is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    return "".join(d.text for d in deltas), deltas[-1], [i for d in deltas for i in d.ids], deltas, aborts


# ------------------------------------------------------------------------------------------------ requests in


def test_prompt_text_gets_bos_once_and_the_owner() -> None:
    admit = admitted(request("hi"))
    assert admit.ids.tolist() == [BOS, 104, 105]
    assert admit.ids.dtype == np.int32
    assert (admit.uid, admit.owner) == (7, 3)


def test_a14_text_after_a_template_gets_no_bos() -> None:
    r = request(None, messages=({"role": "user", "content": "x"},), param="messages")
    assert admitted(r).ids.tolist() == list(b"[user]x")


def test_add_special_tokens_is_honoured_both_ways() -> None:
    assert admitted(request("hi", add_special_tokens=False)).ids.tolist() == [104, 105]
    chat = request(None, messages=({"role": "user", "content": "x"},), add_special_tokens=True)
    assert admitted(chat).ids.tolist()[0] == BOS


def test_token_prompts_are_taken_as_they_are() -> None:
    assert admitted(request(None, ids=(1, 2, 258))).ids.tolist() == [1, 2, 258]


def test_a15_stop_set_is_the_union_of_tokenizer_and_model() -> None:
    assert admitted(request()).sampling.stop_ids == (EOS, TURN_END)
    assert admitted(request(stop_token_ids=(5,))).sampling.stop_ids == (5, EOS, TURN_END)


def test_a15_ignore_eos_turns_all_of_them_off_but_not_explicit_stops() -> None:
    assert admitted(request(ignore_eos=True)).sampling.stop_ids == ()
    assert admitted(request(ignore_eos=True, stop_token_ids=(5,))).sampling.stop_ids == (5,)


def test_unset_sampling_fields_are_the_models_then_neutral() -> None:
    spec = admitted(request(top_p=0.9)).sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p, spec.seed) == (0.5, 0.9, 0, 0.0, None)
    spec = admitted(request(), replace(INFO, defaults={})).sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (1.0, 1.0, 0, 0.0)
    assert spec.repetition_penalty == 1.0
    penalizing = replace(INFO, defaults={"repetition_penalty": 1.1})
    assert admitted(request(), penalizing).sampling.repetition_penalty == 1.1
    assert admitted(request(repetition_penalty=1.0), penalizing).sampling.repetition_penalty == 1.0


def test_zero_means_greedy_for_temperature_and_top_p() -> None:
    assert admitted(request(temperature=0)).sampling.greedy
    assert admitted(request(temperature=1, top_p=0)).sampling.greedy
    assert admitted(request(top_k=-1)).sampling.top_k == 0


def test_choices_have_seeds_of_their_own_that_repeat() -> None:
    first = processor().submit([7, 8, 9], request(n=3, seed=-5))[1]
    again = processor().submit([7, 8, 9], request(n=3, seed=-5))[1]
    seeds = [a.sampling.seed for a in first]
    assert seeds == [a.sampling.seed for a in again]
    assert seeds[0] == -5
    assert len(set(seeds)) == 3
    assert all(s is not None and -(1 << 63) <= s < 1 << 63 for s in seeds)


def test_namespace_priority_and_key_are_passed_on() -> None:
    admit = admitted(request(cache_salt="tenant", priority=2, key="kim"))
    assert (admit.namespace, admit.priority, admit.key) == (b"tenant", 2, "kim")
    assert (admitted(request()).namespace, admitted(request()).key) == (b"", "")


@pytest.mark.parametrize("key", ["x" * 129, 7, None])
def test_impossible_keys_are_refused(key: Any) -> None:
    assert refused(request(key=key)).param == "key"


def test_max_tokens_unset_fills_the_context() -> None:
    assert admitted(request("a" * 9)).sampling.max_new == 64 - 10


def test_a9_explicit_overflow_is_refused_with_the_counts() -> None:
    r = refused(request("a" * 9, max_tokens=55))
    assert (r.status, r.code, r.param) == (400, "context_length_exceeded", "prompt")
    assert r.message.startswith(
        "This model's maximum context length is 64 tokens. However, you requested 65 tokens "
        "(10 in the prompt, 55 in the completion)."
    )
    assert admitted(request("a" * 9, max_tokens=54)).sampling.max_new == 54


def test_a9_defaulted_maximum_is_clamped() -> None:
    assert admitted(request("a" * 9, max_tokens=500, clamp_max_tokens=True)).sampling.max_new == 54


@pytest.mark.parametrize("clamp", [True, False])
def test_a9_prompt_that_fills_the_context_is_refused(clamp: bool) -> None:
    r = refused(request("a" * 63, max_tokens=16 if clamp else None, clamp_max_tokens=clamp))
    assert r.code == "context_length_exceeded"
    assert "you requested 65 tokens (64 in the prompt, 1 in the completion)" in r.message


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    tokenizer = ByteTokenizer()
    told, _ = TextProcessor(tokenizer, INFO).submit([1], request("a" * 10_000, param="messages"))
    assert isinstance(told[0], Refused)
    assert (told[0].code, told[0].param) == ("context_length_exceeded", "messages")
    assert tokenizer.encoded == []


def test_a10_empty_prompt_is_bos_alone_or_refused() -> None:
    assert admitted(request("")).ids.tolist() == [BOS]
    assert refused(request(""), bos=None).code == "invalid_value"
    assert refused(request("", add_special_tokens=False)).param == "prompt"
    assert refused(request(None, ids=())).code == "invalid_value"


@pytest.mark.parametrize("bad", [-1, 259, 1 << 40])
def test_a11_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    r = refused(request(None, ids=(1, bad)))
    assert (r.status, r.code, r.param) == (400, "invalid_value", "prompt[1]")
    r = refused(request(stop_token_ids=(1, 2, bad)))
    assert (r.status, r.code, r.param) == (400, "invalid_value", "stop_token_ids[2]")


def test_a11_ids_of_the_tokenizer_are_checked_as_well() -> None:
    """A tokenizer with more tokens than the model has embeddings."""
    assert refused(request("é"), replace(INFO, vocab=150)).code == "invalid_value"


def test_lone_surrogates_are_refused() -> None:
    assert refused(request("a\ud800b")).code == "invalid_value"


def test_template_refusals_reach_the_client() -> None:
    r = refused(request(None, messages=({"role": "user", "content": "x"},), template={"fail": True}, param="messages"))
    assert (r.status, r.code, r.param) == (400, "invalid_value", "messages")
    r = refused(request(None, messages=({"role": "user", "content": "x"},), template={"messages": []}))
    assert (r.code, r.param) == ("invalid_value", "chat_template_kwargs.messages")


def test_an_unexpected_error_is_a_500_for_this_request_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ByteTokenizer):
        def encode(self, text: str, special: bool) -> I32:
            raise KeyError(text)

    told, admits = TextProcessor(Broken(), INFO).submit([7], request("x"))
    assert told == [Refused(7, 500, "the request could not be processed", "internal_error")]
    assert admits == []
    assert "could not be processed" in caplog.text


def test_without_a_tokenizer_only_ids_are_served() -> None:
    p = TextProcessor(None, INFO)
    assert isinstance(p.submit([1], request("x"))[0][0], Refused)
    assert isinstance(p.submit([1], request(None, ids=(1,), stop=("x",)))[0][0], Refused)
    assert isinstance(p.submit([1], request(None, ids=(1,)))[0][0], Accepted)
    told, _ = p.engine_outputs([tokens([(1, 65)])])
    assert told == [Delta(1, ids=(65,))]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", "0.5", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("temperature", float("nan"), "invalid_value"),
        ("top_p", 1.5, "decimal_above_max_value"),
        ("min_p", -1, "decimal_below_min_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("top_k", 1.5, "invalid_type"),
        ("seed", 1 << 63, "integer_above_max_value"),
        ("seed", -(1 << 63) - 1, "integer_below_min_value"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("ignore_eos", 1, "invalid_type"),
        ("stop", "x", "invalid_type"),
        ("stop", ("x",) * 17, "array_above_max_length"),
    ],
)
def test_sampling_values_out_of_range_have_the_codes_of_the_api(field: str, value: Any, code: str) -> None:
    with pytest.raises(RequestError) as e:
        check_sampling(SamplingParams(**{field: value}))
    assert (e.value.status, e.value.code, e.value.param) == (400, code, field)


def test_empty_stop_strings_are_named() -> None:
    with pytest.raises(RequestError) as e:
        check_sampling(SamplingParams(stop=("a", "")))
    assert (e.value.code, e.value.param) == ("invalid_value", "stop[1]")


@pytest.mark.parametrize(("n", "code"), [(0, "integer_below_min_value"), (129, "integer_above_max_value")])
def test_n_out_of_range_is_refused(n: int, code: str) -> None:
    told, _ = processor().submit([1], request(n=n))
    assert isinstance(told[0], Refused)
    assert (told[0].code, told[0].param) == (code, "n")


def test_no_uids_harm_nobody() -> None:
    assert processor().submit([], request(n=0)) == ([], [])


class Picky(ByteTokenizer):
    """Makes one decoder, and fails at the second."""

    made = 0

    def decoder(self, skip_special: bool) -> Decoder:
        self.made += 1
        if self.made > 1:
            raise RuntimeError("no more decoders")
        return super().decoder(skip_special)


def test_tokenizer_that_fails_in_the_middle_of_a_request_refuses_it_and_keeps_nothing() -> None:
    p = TextProcessor(Picky(), INFO)
    (refusal,), admits = p.submit([7, 8], request(n=2))
    assert isinstance(refusal, Refused)
    assert (refusal.uid, refusal.status, admits) == (7, 500, [])
    assert p.cancel([7, 8]) == []


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, "a\ud800"])
def test_impossible_cache_salts_are_refused(salt: str) -> None:
    assert refused(request(cache_salt=salt)).param == "cache_salt"


def test_tokenize_and_detokenize() -> None:
    p = processor()
    assert p.tokenize(request("hi")) == [BOS, 104, 105]
    assert p.detokenize([104, 105]) == "hi"
    with pytest.raises(RequestError) as e:
        p.detokenize([104, 999])
    assert e.value.param == "tokens[1]"


# ------------------------------------------------------------------------------------------------ tokens out


def test_text_of_each_token_comes_at_once_and_the_counts_last() -> None:
    text, last, ids, deltas, _ = run([*b"Hello", EOS], Finish.STOP)
    assert text == "Hello"
    assert [d.text for d in deltas[:5]] == list("Hello")
    assert ids == [*b"Hello", EOS]
    assert (last.finish, last.stop_reason, last.usage) == ("stop", None, Usage(3, 6, 2))


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=12), batch=st.integers(1, 5), eos=st.booleans())
def test_a3_joined_deltas_are_the_decoded_whole(text: str, batch: int, eos: bool) -> None:
    ids = [*text.encode(), EOS] if eos else [*text.encode()]
    got, last, seen, deltas, _ = run(ids, Finish.STOP if eos else Finish.LENGTH, batch)
    assert got == text
    assert seen == ids
    assert all(c in text for d in deltas for c in d.text)
    assert last.finish == ("stop" if eos else "length")


def test_a3_prompt_that_ends_in_half_a_character_leaks_nothing() -> None:
    p = processor()
    p.submit([7], request(None, ids=(*b"prompt", 0xE4, 0xB8)))
    told, _ = p.engine_outputs([tokens([(7, 0x96)]), tokens([(7, 65)])])
    assert [d.text for d in told if isinstance(d, Delta)] == ["\ufffdA"]


def test_a3_cut_character_is_one_replacement_in_the_last_delta() -> None:
    text, last, *_ = run([65, 0xE4, 0xB8], Finish.LENGTH)
    assert text == "A\ufffd"
    assert (last.text, last.finish) == ("\ufffd", "length")


def test_a1_stop_string_is_held_and_cut_and_the_engine_is_told() -> None:
    text, last, ids, _, aborts = run([*b"ABC", *b"DEFGHIJ", *b"more"], Finish.ABORT, stop=("DEFGHIJ",))
    assert text == "ABC"
    assert aborts == [7]
    assert (last.finish, last.stop_reason) == ("stop", "DEFGHIJ")
    assert ids == [*b"ABCDEFGHIJ"]
    assert last.usage == Usage(3, 10, 2)  # tokens of the match count, those after it do not


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_a1_several_tokens_at_once_end_at_the_same_place(batch: int) -> None:
    text, last, ids, _, aborts = run([*b"xEND then"], Finish.LENGTH, batch, stop=("END",))
    assert (text, ids, aborts) == ("x", [*b"xEND"], [7])
    assert (last.finish, last.stop_reason) == ("stop", "END")


def test_include_stop_str_in_output_keeps_it_and_nothing_after() -> None:
    text, *_ = run([*b"xEND then"], Finish.ABORT, stop=("END",), include_stop_str_in_output=True)
    assert text == "xEND"


def test_a2_held_text_is_flushed_when_generation_ends_otherwise() -> None:
    text, last, *_ = run([*b"xEN", EOS], Finish.STOP, stop=("END",))
    assert text == "xEN"
    assert (last.finish, last.stop_reason) == ("stop", None)
    assert run([*b"xEN"], Finish.LENGTH, stop=("END",))[0] == "xEN"


def test_stop_strings_do_not_match_in_the_prompt() -> None:
    assert run([*b"ND"], Finish.LENGTH, text="xE", stop=("END",))[0] == "ND"


def test_stop_token_gives_no_text_and_explicit_ones_are_the_reason() -> None:
    text, last, ids, *_ = run([*b"hi", 33], Finish.STOP, stop_token_ids=(33,))
    assert (text, ids, last.stop_reason) == ("hi", [*b"hi", 33], 33)
    assert run([*b"hi", EOS], Finish.STOP, stop_token_ids=(EOS,))[1].stop_reason is None
    assert run([*b"hi", EOS], Finish.STOP, stop_token_ids=(EOS,), ignore_eos=True)[1].stop_reason == EOS


def test_stop_token_keeps_its_text_with_include_stop_str_in_output() -> None:
    assert run([*b"hi", 33], Finish.STOP, stop_token_ids=(33,), include_stop_str_in_output=True)[0] == "hi!"


def test_ignored_eos_is_an_ordinary_token() -> None:
    text, last, ids, *_ = run([65, EOS, 66], Finish.LENGTH, ignore_eos=True, skip_special_tokens=False)
    assert (text, ids, last.finish) == ("A</s>B", [65, EOS, 66], "length")
    assert run([65, EOS, 66], Finish.LENGTH, ignore_eos=True)[0] == "AB"


def test_tokens_after_a_stop_token_are_dropped() -> None:
    text, last, ids, *_ = run([65, EOS, 66], Finish.STOP)
    assert (text, ids, last.usage) == ("A", [65, EOS], Usage(3, 2, 2))


def test_choices_are_kept_apart_and_numbered() -> None:
    p = processor()
    p.submit([7, 8], request(n=2))
    told, _ = p.engine_outputs([tokens([(7, 65), (8, 66)]), tokens([(8, 67), (7, 68)]), ended(8, Finish.LENGTH, 2)])
    assert {(d.uid, d.index, d.text, d.finish) for d in told if isinstance(d, Delta)} == {
        (7, 0, "AD", None),
        (8, 1, "BC", "length"),
    }


def test_nothing_is_told_after_a_cancel() -> None:
    p = processor()
    p.submit([7, 8], request(n=2))
    assert p.cancel([7, 99]) == [7]
    assert p.cancel([7]) == []
    told, aborts = p.engine_outputs([tokens([(7, 65), (8, 66)]), ended(7, Finish.ABORT, 1)])
    assert [d.uid for d in told if isinstance(d, Delta)] == [8]
    assert aborts == []
    assert p.engine_outputs([tokens([(7, 65)]), ended(7, Finish.ABORT, 1)]) == ([], [])


def test_cancel_before_anything_ran_ends_quietly() -> None:
    p = processor()
    p.submit([7], request())
    p.cancel([7])
    assert p.engine_outputs([ended(7, Finish.ABORT)]) == ([], [])


def test_engine_errors_and_refusals_reach_the_client() -> None:
    p = processor()
    p.submit([7], request())
    p.submit([8], request())
    told, _ = p.engine_outputs([ended(7, Finish.ERROR, detail="out of pages"), Refused(8, 400, "too long", "c", "p")])
    assert told == [
        Delta(7, finish="error", usage=Usage(3, 0, 0), error="out of pages"),
        Refused(8, 400, "too long", "c", "p"),
    ]
    assert p.engine_outputs([ended(8, Finish.ABORT)]) == ([], [])


def test_an_abort_that_the_client_did_not_ask_for_is_told() -> None:
    p = processor()
    p.submit([7], request())
    told, _ = p.engine_outputs([ended(7, Finish.ABORT)])
    assert [d.finish for d in told if isinstance(d, Delta)] == ["abort"]
