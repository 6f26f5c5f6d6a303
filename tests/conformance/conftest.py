"""A real HTTP server whose engine replays given tokens.

Everything is the product's own (host, frontend, engine client, text processor, tokenizer, engine, scheduler, scripted
executor); only the sockets between the processes are replaced by direct calls, so that a test can hold the engine still.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from minisgl.base.types import Accepted, Admit, Delta, Ended, EngineOutput, Finish, LocalModel, Refused
from minisgl.client.client import EngineClient
from minisgl.client.frontend import FrontendContext
from minisgl.client.http import HttpHost
from minisgl.config.schema import KindSection, Settings
from minisgl.engine.build import build_engine
from minisgl.engine.port import Abort, Control, LocalPort
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl.text.create import make_processor, make_tokenizer
from minisgl.text.tokenizer import Tokenizer
from minisgl.wire import messages as wire
from minisgl_plugins.executor.script import Script
from minisgl_plugins.executor.scripted import ScriptedExecutor

FRONTENDS = ("openai", "responses", "anthropic")
MAX_LEN = 256
EOS, START = 1, 2
SPECIAL = ("<|unused|>", "<|im_end|>", "<|im_start|>")
WORDS = (
    "Hello",
    " world",
    "E",
    "N",
    "D then",
    "EN",
    "x END y",
)  # tokens of more than one byte, and how stop strings split
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template with tools and reasoning, and what tells the parsers of each family apart.
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}:{{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n' if enable_thinking }}{% endif %}"
)
FAMILIES = {
    "hermes": TOOL_TEMPLATE + '{# <tool_call>{"name": ..., "arguments": ...} <think> #}',
    "qwen3-xml": TOOL_TEMPLATE + "{# <tool_call><function=f><parameter=a> #}",
    "llama3-json": TOOL_TEMPLATE + '{# <|eot_id|> "parameters" #}',
    "pythonic": TOOL_TEMPLATE + "{# [func_name1(params_name1=params_value1)] #}",
}


class Vocabulary:
    """Byte-level: each byte is a token, and each of WORDS. ``ids`` of a text are those of its UTF-8 bytes."""

    def __init__(self) -> None:
        # The GPT-2 alphabet: a printable character for each byte.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        self.vocab = {t: i for i, t in enumerate(SPECIAL)}
        self.byte = {b: self.vocab.setdefault(chars[b], len(self.vocab)) for b in range(256)}
        self.word: dict[str, int] = {}
        for w in WORDS:
            spelled = "".join(chars[b] for b in w.encode())
            self.word[w] = self.vocab.setdefault(spelled, len(self.vocab))

    def ids(self, text: str | bytes) -> list[int]:
        return [self.byte[b] for b in (text.encode() if isinstance(text, str) else text)]

    @property
    def size(self) -> int:
        return len(self.vocab)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--base-url`` only what asks a server is run."""
    if config.getoption("--base-url") is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and "target" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="asks the server of the repository, or none"))


@pytest.fixture(scope="session")
def vocabulary(pytestconfig: pytest.Config) -> Vocabulary:
    if pytestconfig.getoption("--base-url") is not None:
        pytest.skip("needs an engine that replays given tokens")
    return Vocabulary()


@pytest.fixture(scope="session")
def model(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """A model folder without weights."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary.vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary.size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    return LocalModel(ref=str(path), name="org/name", path=path, config=config, tokenizer_dir=path)


class Served:
    """The server of one test module, in a thread with an event loop of its own."""

    def __init__(self, model: LocalModel, settings: Settings, hooks: Sequence[object] = ()) -> None:
        self.settings = settings
        self.registry = Registry.scan(bundled_only=True)
        self.hooks = Hooks(self.registry, list(hooks))
        self.port = LocalPort()
        self.engine = build_engine(settings, self.registry, model, self.port)
        executor = self.engine.executor
        assert isinstance(executor, ScriptedExecutor)
        self.executor = executor
        tokenizer = make_tokenizer(settings, self.registry, model)
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer
        self.text = make_processor(settings, self.registry, model, tokenizer, self.engine.info)
        self.client = EngineClient(
            [self._to_text],
            self._to_engine,
            settings.limits.queue,
            check=lambda r, info: self.hooks.call("check_request", request=r, info=info),
            first_token_s=settings.server.request_timeout_s,
        )
        self.admitted: list[Admit] = []  # what reached the engine
        self.aborted: list[tuple[int, float]] = []  # uid, time.monotonic
        self.tripped = ""  # set: the engine is dead, with these words
        self._passes: float = math.inf  # that the engine may still make
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the server did not start"

    # -- for tests

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def replies(self, *replies: Any, **script: Any) -> None:
        """The next requests, in order of admission, are answered with these token ids."""
        self.executor.book.use(Script.model_validate({"in_order": list(replies), **script}))

    def hold(self, passes: int = 0) -> None:
        """The engine makes passes with work to do until this many steps are committed, and then no more until ``go_on``."""
        self._passes = passes + self.engine.loop.depth - 1 if passes else 0

    def go_on(self) -> None:
        self._passes = math.inf

    def give_up(self, uid: int, detail: str) -> None:
        """The engine ends one request with an error of its own."""

        async def end() -> None:
            ended = Ended(uid, Finish.ERROR, 0, 0, 0, detail)
            self._tell(self.text.engine_outputs([ended])[0])
            self.port.inputs.append(Abort((uid,)))

        self.run(end)

    def run(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(20)

    def counts(self) -> dict[str, Any]:
        return {**self.engine.stats(), "open": self.client.num_open}

    def close(self) -> None:
        self.go_on()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    # -- the processes around the engine, as calls

    def _to_text(self, message: wire.Message) -> None:
        if isinstance(message, wire.Submit):
            told, admits = self.text.submit(message.uids, message.request)
            self.loop.call_soon(self._tell, told)
            self.admitted += admits
            self.port.inputs.extend(admits)
        elif isinstance(message, wire.Cancel):
            self._abort(self.text.cancel(message.uids))
        elif isinstance(message, (wire.Tokenize, wire.Detokenize)):
            self.loop.call_soon(self._answer, message)

    def _answer(self, message: wire.Tokenize | wire.Detokenize) -> None:
        from minisgl.base.errors import RequestError

        try:
            if isinstance(message, wire.Tokenize):
                self.client.take(wire.Tokenized(message.uid, tuple(self.text.tokenize(message.request))))
            else:
                self.client.take(wire.Detokenized(message.uid, self.text.detokenize(message.ids)))
        except RequestError as e:
            self.client.take(Refused(message.uid, e.status, e.message, e.code, e.param))

    def _to_engine(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Control)
        uid = message.uid
        self.port.inputs.append(Control(message.op, lambda payload: self.client.take(wire.Reply(uid, payload))))

    def _abort(self, uids: Sequence[int]) -> None:
        if uids:
            self.aborted += [(uid, self.loop.time()) for uid in uids]
            self.port.inputs.append(Abort(tuple(uids)))

    def _tell(self, items: Sequence[Accepted | Refused | Delta]) -> None:
        for item in items:
            self.client.take(wire.Deltas((item,)) if isinstance(item, Delta) else item)

    async def _engine_loop(self) -> None:
        for step in itertools.count():
            self.client.take(wire.Beat(step, 0.0))
            if self._passes > 0 and (self.port.inputs or not self.engine.idle):
                self._passes -= 1
                self._turn()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0.001)
            if self.tripped:
                return

    def _turn(self) -> None:
        try:
            self.engine.turn()
        except Exception as exc:  # as the engine process does it: any exception is the end of the engine
            self.tripped = str(exc)
            self.client.fail(self.tripped)
            return
        outputs: list[EngineOutput] = list(self.port.outputs)
        self.port.outputs.clear()
        told, aborts = self.text.engine_outputs(outputs)
        self._tell(told)
        self._abort(aborts)

    def _frontend(self, name: str) -> Any:
        return self.registry.create(
            "frontend",
            name,
            self.settings.options("frontend", name),
            lambda s: FrontendContext(s, self.client, self.settings, self.hooks),
        )

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.host = HttpHost(self.settings, self.client, {n: self._frontend(n) for n in FRONTENDS}, self.hooks)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.client.ready(self.engine.info)
        serving = asyncio.ensure_future(self.host.serve(sock))
        engine = asyncio.ensure_future(self._engine_loop())
        self._started.set()
        await asyncio.wait((asyncio.ensure_future(self._stop.wait()), serving), return_when=asyncio.FIRST_COMPLETED)
        self.host.close()
        await serving
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        self.engine.close(1.0)


def scripted_settings(**sections: Any) -> Settings:
    kinds = {"executor": KindSection(use="scripted"), "observer": KindSection(use=())}
    return Settings.model_validate({"kinds": kinds, **sections})


@pytest.fixture(scope="module")
def start(model: LocalModel) -> Iterator[Callable[..., Served]]:
    """Start a server with these settings, and maybe ``other`` model files; they all end with the test module."""
    running: list[Served] = []

    def make(hooks: Sequence[object] = (), other: LocalModel | None = None, **sections: Any) -> Served:
        served = Served(other or model, scripted_settings(**sections), hooks)
        running.append(served)
        return served

    yield make
    for served in running:
        served.close()


@pytest.fixture(scope="module")
def long_model(model: LocalModel, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """With room for tools in the prompt."""
    path = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model.path, path)
    config = {**model.config, "max_position_embeddings": 2048}
    (path / "config.json").write_text(json.dumps(config))
    return replace(model, path=path, tokenizer_dir=path, config=config)


@pytest.fixture(scope="module")
def family(start: Any, long_model: LocalModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose model has the chat template of a family; made once each."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
            file.write_text(FAMILIES[name])
            made[name] = start(other=long_model, model={"chat_template": str(file)})
        return made[name]

    return get


@pytest.fixture(scope="session")
def shared(model: LocalModel) -> Iterator[Served]:
    served = Served(model, scripted_settings())
    yield served
    served.close()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """The usual server; every request must have ended, and its pages must be back, when a test ends."""
    shared.replies()
    shared.admitted.clear()
    shared.aborted.clear()
    yield shared
    shared.go_on()
    wait_until(lambda: shared.engine.idle and shared.client.num_open == 0, shared)


def wait_until(fact: Callable[[], bool], served: Served, seconds: float = 10) -> float:
    """Look in the server's own loop until ``fact`` holds. Returns: seconds it took."""

    async def look() -> float:
        start = served.loop.time()
        while not fact():
            assert served.loop.time() - start < seconds, "it did not happen"
            await asyncio.sleep(0.001)
        return served.loop.time() - start

    return float(served.run(look))


class Api:
    """Short ways to say what the tests say often."""

    def __init__(self, target: Target) -> None:
        self.http = httpx.Client(base_url=target.url, headers=target.headers, timeout=60)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def post(self, path: str, body: Any, **kw: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kw)

    @staticmethod
    def chunks(response: httpx.Response) -> list[dict[str, Any]]:
        """The JSON of a stream's frames; checks the frames themselves."""
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        assert "x-request-id" in response.headers
        assert response.text.endswith("data: [DONE]\n\n")
        frames = response.text.removesuffix("\n\n").split("\n\n")
        assert all(f.startswith("data: ") and "\n" not in f for f in frames if not f.startswith(":"))
        return [json.loads(f[6:]) for f in frames[:-1] if not f.startswith(":")]

    @staticmethod
    def text(chunks: list[dict[str, Any]], index: int = 0) -> str:
        """All text of one choice of a stream."""
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)

    @staticmethod
    def refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
        """Check the error envelope. Returns: the message."""
        assert response.headers["content-type"] == "application/json", response.text
        assert "x-request-id" in response.headers
        body = response.json()
        assert set(body) == {"error"}
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        kind = "server_error" if status >= 500 else "invalid_request_error"
        assert (response.status_code, error["code"], error["param"], error["type"]) == (status, code, param, kind), (
            error
        )
        assert len(error["message"].encode()) <= 1024
        return str(error["message"])


@dataclass(frozen=True)
class Target:
    """The server under test. ``key``: "" if it takes none."""

    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    """The server of ``--base-url``, or the usual one."""
    url, key = request.config.getoption("--base-url"), request.config.getoption("--api-key")
    if url is None:
        return Target(request.getfixturevalue("served").url)
    return Target(url.rstrip("/").removesuffix("/v1"), key)


@pytest.fixture
def api(target: Target) -> Iterator[Api]:
    made = Api(target)
    yield made
    made.http.close()


@pytest.fixture
def http(target: Target) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=target.url, headers=target.headers, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(target: Target) -> Iterator[openai.OpenAI]:
    url, key = f"{target.url}/v1", target.key or "none"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model_name(http: httpx.Client) -> str:
    """The first that is served."""
    return str(http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture
def until(served: Served) -> Callable[..., float]:
    """Wait until something holds in the usual server. Returns: seconds it took."""
    return lambda fact: wait_until(fact, served)
