"""The parsers of one output as a chain: text -> reasoning parser -> stop strings -> tool call parser -> parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from minisgl.base.errors import ConfigError, RequestError
from minisgl.base.types import ParseSpec, Part
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.text.parser import OutputParser, ParserContext, Stage
from minisgl.text.stops import StopHolder

Make = Callable[[ParserContext], OutputParser]


class Parsing:
    """One output. ``matched``: the stop string that ended it; ``full``: it has as many calls as were asked for."""

    def __init__(
        self,
        reasoning: OutputParser | None = None,
        calls: OutputParser | None = None,
        stops: StopHolder | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning, self._calls, self._stops = reasoning, calls, stops
        self._left = max_calls
        self.full = False

    @property
    def thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def matched(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def push(self, text: str, ids: Sequence[int]) -> list[Part]:
        parts = [Part("content", text)] if self._reasoning is None else self._reasoning.push(text, ids)
        return self._after(parts, ids)

    def finish(self, why: str) -> list[Part]:
        """The rest, when the text ends. After a stop string or the last call there is none but what parsers hold."""
        parts = [] if self._reasoning is None else self._reasoning.finish(why)
        out = self._after(parts, ())
        if self._stops is not None and not self.full:
            out += self._called(self._stops.flush(), ())
        if self._calls is not None and not self.full:
            out += self._limited(self._calls.finish(why))
        return out

    def _after(self, parts: Iterable[Part], ids: Sequence[int]) -> list[Part]:
        """Content goes on to the later stages."""
        out: list[Part] = []
        for part in parts:
            if self.full or self.matched is not None:
                break
            if part.kind != "content":
                out.append(part)
                continue
            text = part.text if self._stops is None else self._stops.push(part.text)
            out += self._called(text, ids)
        return out

    def _called(self, text: str, ids: Sequence[int]) -> list[Part]:
        if not text:
            return []
        return [Part("content", text)] if self._calls is None else self._limited(self._calls.push(text, ids))

    def _limited(self, parts: list[Part]) -> list[Part]:
        """Up to the end of the last call that is wanted."""
        if self._left is None:
            return parts
        for at, part in enumerate(parts):
            self._left -= part.kind == "end"
            if self._left <= 0:
                self.full = True
                return parts[: at + 1]
        return parts


class Parsers:
    """The parsers that this server uses, at most one of each stage."""

    def __init__(self, chosen: Mapping[Stage, tuple[type[OutputParser], Make]]) -> None:
        self._chosen = dict(chosen)

    def tags(self, spec: ParseSpec) -> tuple[str, ...]:
        """Texts that the output must show though they may be special tokens."""
        return tuple(tag for stage in self._stages(spec) for tag in self._chosen[stage][0].tags)

    def needed(self, spec: ParseSpec) -> bool:
        """Whether anything here has to look at the output."""
        return bool(self._stages(spec))

    def thinks(self, spec: ParseSpec) -> bool:
        return "reasoning" in self._stages(spec)

    def check(self, spec: ParseSpec) -> None:
        """Raises: RequestError if tool calls are wanted and nothing here can read them."""
        if spec.calls and "calls" not in self._chosen:
            raise RequestError(
                "'tools' cannot be served: no parser is known for the tool calls of this model. Start the server with "
                "parser.use = hermes, llama3-json, pythonic or qwen3-xml, as the model writes them.",
                code="unsupported_parameter",
                param="tools",
            )

    def calls(self, spec: ParseSpec) -> OutputParser:
        """One that has seen nothing, of the tool calls. Raises: RequestError if there is none."""
        self.check(spec)
        return self._chosen["calls"][1](ParserContext(None))

    def reasoning_tags(self, prompt: str, continued: str) -> tuple[str, str] | None:
        """As ``OutputParser.reasoning_tags``."""
        if "reasoning" not in self._chosen:
            return None
        return self._chosen["reasoning"][1](ParserContext(None, (), prompt, continued)).reasoning_tags()

    def start(
        self,
        spec: ParseSpec,
        stops: StopHolder | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str = "",
        continued: str = "",
        sure: bool = False,
    ) -> Parsing:
        """For one more output. ``sure``: it is held to a grammar of its calls."""
        stages = self._stages(spec)
        cuts = self._chosen["calls"][0].openers if "calls" in stages else ()
        ctx = ParserContext(None, tools, prompt, continued, cuts, sure)
        made = {stage: self._chosen[stage][1](ctx) for stage in stages}
        return Parsing(made.get("reasoning"), made.get("calls"), stops, spec.max_calls)

    def _stages(self, spec: ParseSpec) -> list[Stage]:
        wanted: list[Stage] = ["reasoning"] if spec.reasoning else []
        if spec.calls:
            wanted.append("calls")
        return [stage for stage in wanted if stage in self._chosen]


def make_parsers(settings: Settings, registry: Registry, template: str) -> Parsers:
    """The configured parsers; ``auto``: those that fit the chat ``template`` best.

    Raises: ConfigError for two of one stage; PluginError.
    """
    names = settings.use("parser")
    if names == ("auto",):
        names = _fitting(registry, template)
    chosen: dict[Stage, tuple[type[OutputParser], Make]] = {}
    owner: dict[Stage, str] = {}
    for name in names:
        cls = cast(type[OutputParser], registry.load("parser", name))
        if cls.stage in chosen:
            raise ConfigError(
                f"parser.use names {owner[cls.stage]!r} and {name!r}, which both parse {cls.stage}; leave one of them out"
            )
        chosen[cls.stage] = (cls, _maker(registry, name, settings.options("parser", name)))
        owner[cls.stage] = name
    return Parsers(chosen)


def _fitting(registry: Registry, template: str) -> tuple[str, ...]:
    """Of each stage the name that fits best; of equals the first by name."""
    best: dict[Stage, tuple[int, str]] = {}
    for name in registry.names("parser"):
        cls = cast(type[OutputParser], registry.load("parser", name))
        score = cls.fits(template) if template else 0
        if score > best.get(cls.stage, (0, ""))[0]:
            best[cls.stage] = (score, name)
    return tuple(name for _, name in best.values())


def _maker(registry: Registry, name: str, options: Mapping[str, Any]) -> Make:
    cls = cast(type[OutputParser], registry.load("parser", name))
    settings = registry.settings("parser", name, options)

    def make(ctx: ParserContext) -> OutputParser:
        return cls(replace(ctx, settings=settings))

    return make
