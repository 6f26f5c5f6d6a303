"""The Python API around the engine, on the scripted device: streams side by side, many prompts, refusals, settings files."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, Pipeline, SamplingParams
from minisgl.api.hookspec import hookimpl
from minisgl.base.errors import ConfigError, Fault, ModelError, RequestError
from minisgl.base.types import GenerateRequest
from minisgl.testing.bytemodel import byte_ids, write_byte_model

ALL = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes") / "model")


def open_llm(folder: Path, **options: Any) -> LLM:
    """Each prompt is its own answer."""
    return LLM(folder, executor="scripted", observer=[], show_progress=False, **options)


def test_streams_read_in_turn_lose_nothing(folder: Path) -> None:
    with open_llm(folder) as llm:
        one, two = llm.stream("abcdef", ALL), llm.stream("uvwxyz", ALL)
        texts = ["", ""]
        for a, b in zip(one, two, strict=True):
            texts = [texts[0] + a.text, texts[1] + b.text]
    assert texts == ["abcdef", "uvwxyz"]


def test_batch_beside_an_open_stream_loses_nothing(folder: Path) -> None:
    with open_llm(folder) as llm:
        stream = llm.stream("abcdef", ALL)
        text = next(stream).text
        assert llm.generate("xyz", ALL)[0].text == "xyz"
        assert text + "".join(d.text for d in stream) == "abcdef"


def test_stream_that_is_never_read_runs_nothing(folder: Path) -> None:
    with open_llm(folder) as llm:
        llm.stream("abc", ALL)
        assert llm.pipeline.idle


def test_outputs_taken_by_another_are_an_error_and_no_hang(folder: Path) -> None:
    with open_llm(folder) as llm:
        stream = llm.stream("abcdef", ALL)
        next(stream)
        while not llm.pipeline.idle:
            llm.pipeline.step()
        with pytest.raises(Fault, match=r"another caller of Pipeline.step"):
            list(stream)


def test_batch_may_have_more_prompts_than_a_server_lets_wait(folder: Path) -> None:
    """limits.queue is for servers, whose clients can come again; an offline batch is one call."""
    prompts = [byte_ids(f"{i:03}") for i in range(40)]
    with open_llm(folder, limits={"queue": 3, "max_running": 2}) as llm:
        assert [o.text for o in llm.generate(prompts, ALL)] == [f"{i:03}" for i in range(40)]


@pytest.mark.parametrize("n", [0, -3, 129, True])
def test_number_of_outputs_is_checked_before_uids_are_made(folder: Path, n: int) -> None:
    with open_llm(folder) as llm:
        with pytest.raises(RequestError, match="n"):
            llm.pipeline.submit(GenerateRequest(text="a", n=n))
        assert llm.pipeline.submit(GenerateRequest(text="a")) == [0]


class NoSecrets:
    @hookimpl
    def check_request(self, request: GenerateRequest) -> None:
        if request.text == "secret":
            raise RequestError("not here", status=403, code="forbidden")


def test_check_request_hooks_are_asked_for_each_request(folder: Path) -> None:
    with open_llm(folder, plugins=[NoSecrets()]) as llm:
        with pytest.raises(RequestError, match="not here"):
            llm.generate(["fine", "secret"], ALL)
        assert llm.generate("fine", ALL)[0].text == "fine"


class Small:
    @hookimpl
    def config_defaults(self) -> dict[str, Any]:
        return {"kv": {"num_pages": 5}}


def test_from_config_takes_the_defaults_of_plugin_objects(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text(f'executor.use = "scripted"\n[model]\npath = "{folder}"\n[kv]\npage_size = 8\n')
    with Pipeline.from_config(file, plugins=[Small()], show_progress=False) as pipeline:
        assert (pipeline.info.num_pages, pipeline.info.page_size) == (5, 8)


def test_broken_tokenizer_is_known_before_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_byte_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("minisgl.client.pipeline.build_engine", lambda *a, **k: pytest.fail("the engine was built"))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_llm(folder)


def test_threads_share_an_llm(folder: Path) -> None:
    texts = [f"{i}" * (5 + i) for i in range(8)]
    with open_llm(folder) as llm, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            outputs = pool.map(lambda text: llm.generate(text, ALL)[0].text, texts)
            assert list(outputs) == texts
        streams = pool.map(lambda text: "".join(d.text for d in llm.stream(text, ALL)), texts)
        assert list(streams) == texts
        llm.pipeline.step()  # the loop may have a step in flight when the last request ends
        assert llm.pipeline.idle


def test_stream_that_is_dropped_in_the_middle_of_a_pass_ends_its_request(folder: Path, monkeypatch: Any) -> None:
    with open_llm(folder) as llm:
        streams = [llm.stream("abcdef", ALL)]
        next(streams[0])
        step = llm.pipeline.step

        def dropping() -> Any:
            streams.clear()
            return step()

        monkeypatch.setattr(llm.pipeline, "step", dropping)
        assert llm.generate("uvw", ALL)[0].text == "uvw"
        assert llm.generate("xyz", ALL)[0].text == "xyz"
        llm.pipeline.step()  # the loop may have a step in flight when the last request ends
        assert llm.pipeline.idle
        assert llm.pipeline.engine.stats()["running"] == 0


def test_pipeline_that_is_dropped_stops_its_device(folder: Path) -> None:
    llm = open_llm(folder)
    stopped: list[float] = []
    llm.pipeline.engine.executor.stop = stopped.append  # type: ignore[method-assign]
    del llm
    gc.collect()
    assert len(stopped) == 1


@pytest.mark.parametrize("prompts", [3.5, None, [3.5], [None], [[3.5]], [["a"]], [[1, "a"]]])
def test_what_is_no_prompt_is_refused(folder: Path, prompts: Any) -> None:
    with open_llm(folder) as llm, pytest.raises(RequestError, match="must be a text"):
        llm.generate(prompts, ALL)


def test_arrays_of_token_ids_are_prompts(folder: Path) -> None:
    ids = np.array(byte_ids("abc"))
    with open_llm(folder) as llm:
        assert [o.text for o in (*llm.generate(ids, ALL), *llm.generate([ids, ids], ALL))] == ["abc"] * 3


def test_setting_given_as_a_component_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_len = 64 is no plugin's name or class"):
        Pipeline(max_len=64)  # type: ignore[arg-type]


def test_after_closing_requests_and_open_streams_are_refused_at_once(folder: Path) -> None:
    llm = open_llm(folder)
    stream = llm.stream("abcdef", ALL)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(Fault, match="is closed"):
        list(stream)
    with pytest.raises(Fault, match="is closed"):
        llm.generate("abc", ALL)
    with pytest.raises(Fault, match="is closed"):
        llm.pipeline.step()


@pytest.mark.parametrize(
    ("ignore_eos", "options", "order"),
    [
        (True, {}, [1, 3, 0, 2]),
        (False, {}, [0, 1, 2, 3]),
        (True, {"scheduler": {"use": "chunked", "chunked": {"order": "fcfs"}}}, [0, 1, 2, 3]),
    ],
)
def test_a_batch_that_ignores_eos_runs_longest_first_unless_an_order_is_set(
    ignore_eos: bool, options: dict[str, Any], order: list[int], folder: Path
) -> None:
    """One row at a time, so that requests end in the order in which they ran."""
    lengths, ended = (2, 7, 1, 5), []
    with open_llm(folder, limits={"max_running": 1}, **options) as llm:
        requests = [
            GenerateRequest(text="abcdefgh", sampling=SamplingParams(max_tokens=n, ignore_eos=ignore_eos))
            for n in lengths
        ]
        uids = llm.pipeline.submit_all(requests)
        while not llm.pipeline.idle:
            ended += [out.uid for out in llm.pipeline.step() if getattr(out, "finish", None)]
        texts = [o.text for o in llm.generate(["abcdefgh"] * 4, [r.sampling for r in requests])]
    assert uids == [[0], [1], [2], [3]]
    assert ended == order
    assert texts == ["abcdefgh"[:n] for n in lengths]


def test_a_batch_with_a_wrong_request_leaves_nothing_behind(folder: Path) -> None:
    with open_llm(folder) as llm:
        with pytest.raises(RequestError):
            llm.pipeline.submit_all([GenerateRequest(text="a"), GenerateRequest(text="a", n=0)])
        while not llm.pipeline.idle:
            assert llm.pipeline.step() == []
        assert llm.generate("xyz", ALL)[0].text == "xyz"
