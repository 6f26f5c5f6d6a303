"""The torch-free part of the public interface for plugins: the only things a plugin imports from minisgl, beside
``minisgl.api.device`` (torch part), ``minisgl.api.hookspec`` (hooks), ``minisgl.nn`` and ``minisgl.testing``."""

from minisgl.base import bounds
from minisgl.base.component import Component, PluginSettings
from minisgl.base.errors import (
    CacheError,
    CapacityError,
    ConfigError,
    Fault,
    MiniSGLError,
    ModelError,
    PluginError,
    RequestError,
)
from minisgl.base.facts import ModelFacts, MoEFacts, RopeFacts, WindowFacts
from minisgl.base.grammar import Grammar, GrammarContext, Matcher, Outline
from minisgl.base.types import (
    I32,
    NO_PAGES,
    Accepted,
    Admit,
    Delta,
    EngineInfo,
    ExecInfo,
    Finish,
    GenerateRequest,
    GrammarSpec,
    Limits,
    LocalModel,
    ParseSpec,
    Part,
    ReqState,
    RowInit,
    SamplingParams,
    SamplingSpec,
    Span,
    StepPlan,
    StepResult,
    Usage,
)
from minisgl.client.client import EngineClient
from minisgl.client.envelope import unavailable
from minisgl.client.exchange import REQUEST_ID, ClientGone, ErrorShape, EventStream, Exchange, route
from minisgl.client.fields import (
    Fields,
    as_array,
    as_integer,
    as_number,
    as_object,
    as_string,
    invalid_type,
    one_of,
)
from minisgl.client.frontend import Frontend, FrontendContext, HttpFrontend
from minisgl.client.router import ReplicaLoad, Router, RouterContext
from minisgl.engine.executor import ExecContext, ExecHealth, Executor
from minisgl.engine.loop import EngineOps, LoopContext, StepLoop, Ticket
from minisgl.observe import Observer, ObserverContext, RequestEvent, StepStats
from minisgl.plugin.command import Command, CommandContext
from minisgl.sched.cache import CacheContext, CachePolicy, CacheStats, EmptyLease, Inserted, Lease
from minisgl.sched.policy import (
    UNBOUNDED,
    Deny,
    Grant,
    ReqView,
    SchedContext,
    SchedulerPolicy,
    SchedView,
    StepBuilder,
)
from minisgl.text.decode import ByteDecoder, WindowDecoder, gpt2_alphabet
from minisgl.text.hold import Words
from minisgl.text.parser import OutputParser, ParserContext, Terminal
from minisgl.text.source import ModelSource, SourceContext
from minisgl.text.tokenizer import Decoder, Tokenizer, TokenizerContext

__all__ = [
    "I32", "NO_PAGES", "REQUEST_ID", "UNBOUNDED", "Accepted", "Admit", "ByteDecoder", "CacheContext", "CacheError",
    "CachePolicy", "CacheStats", "CapacityError", "ClientGone", "Command", "CommandContext", "Component", "ConfigError",
    "Decoder", "Delta", "Deny", "EmptyLease", "EngineClient", "EngineInfo", "EngineOps", "ErrorShape", "EventStream", "Exchange",
    "ExecContext", "ExecHealth", "ExecInfo", "Executor", "Fault", "Fields", "Finish", "Frontend", "FrontendContext",
    "GenerateRequest", "Grammar", "GrammarContext", "GrammarSpec", "Grant", "HttpFrontend", "Inserted", "Lease", "Limits", "LocalModel", "LoopContext",
    "Matcher", "MiniSGLError", "MoEFacts", "ModelError", "ModelFacts", "ModelSource", "Observer", "ObserverContext", "Outline", "OutputParser", "ParseSpec", "ParserContext", "Part", "PluginError",
    "PluginSettings", "ReplicaLoad", "ReqState", "ReqView", "RequestError", "RequestEvent", "RopeFacts", "Router",
    "RouterContext", "RowInit", "SamplingParams",
    "SamplingSpec", "SchedContext", "SchedView", "SchedulerPolicy", "SourceContext", "Span", "StepBuilder", "StepLoop",
    "StepPlan", "StepResult", "StepStats", "Terminal", "Ticket", "Tokenizer", "TokenizerContext", "Usage", "WindowDecoder", "WindowFacts",
    "Words",
    "as_array", "as_integer", "as_number", "as_object", "as_string", "bounds", "gpt2_alphabet", "invalid_type",
    "one_of", "route", "unavailable",
]  # fmt: skip
