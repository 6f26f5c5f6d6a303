"""The command line of ``minisgl simulate``."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.offline import parse_range, positive
from minisgl_cli.simulate.cost import HARDWARE
from minisgl_cli.simulate.shapes import SHAPES
from minisgl_cli.simulate.synthetic import Synthetic

SYNTHETIC = tuple(Synthetic.__dataclass_fields__)
# Settings that a simulation follows; any other given on the command line is refused.
USED = {"cache", "scheduler", "loop", "limits", "kv", "plugins", "log"}
USED_KEYS = {("engine", "seed"), ("engine", "validate")}


def rates(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(rate > 0 for rate in found):
        raise ArgumentTypeError(f"{text!r}: rates are numbers above 0, or inf")
    return found


def names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def number(low: float, high: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high or not isfinite(value):
            raise ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise ArgumentTypeError(f"{text!r} is below 0")
    return value


@dataclass(frozen=True, slots=True)
class Compared:
    """Policies of which several may be named; None: as the settings have it. ``router_options``: router -> option -> value."""

    schedulers: list[str] | None
    caches: list[str] | None
    router_options: dict[str, dict[str, str]]


def compared(argv: Sequence[str]) -> tuple[Compared, list[str]]:
    """Take out what is no setting here: kinds of which several are compared, and ``--router.NAME.OPTION VALUE``.

    Returns: it, and the rest of the command line. Raises: ConfigError for an option of a router without a value.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--scheduler", type=names)
    first.add_argument("--cache", type=names)
    args, rest = first.parse_known_args(list(argv))
    options: dict[str, dict[str, str]] = {}
    left: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--router."):
            left.append(word)
            continue
        flag, eq, value = word.partition("=")
        name, dot, key = flag.removeprefix("--router.").rpartition(".")
        if not dot or not (eq or rest):
            raise ConfigError(f"config: {word}: write --router.NAME.OPTION VALUE")
        options.setdefault(name, {})[key.replace("-", "_")] = value if eq else rest.pop(0)
    return Compared(args.scheduler, args.cache, options), left


def arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("what is simulated")
    group.add_argument("--scheduler", metavar="A[,B]", help="scheduler policies to compare")
    group.add_argument("--cache", metavar="A[,B]", help="cache policies to compare")
    group.add_argument("--replicas", type=positive, default=1, metavar="N", help="engines")
    group.add_argument("--router", type=names, default=["round-robin"], metavar="A[,B]", help="routers to compare")
    group.add_argument("--router.NAME.OPTION", metavar="VALUE", dest="_", help="see minisgl plugins info router.NAME")
    group.add_argument("--shape", default="qwen3-0.6b", metavar="NAME", help=f"config.json, or {', '.join(SHAPES)}")
    group.add_argument("--hardware", choices=tuple(HARDWARE), default="h200", help="rates of the device")
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="measured steps, to fit step times to")
    group.add_argument("--sim-seed", type=natural, default=0, metavar="N", help="of the requests and the policies")
    load_arguments(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON line to FILE")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over load to FILE")


def load_arguments(parser: ArgumentParser) -> None:
    """Which requests come, and when; ``synthetic`` reads them."""
    d = Synthetic()
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--rate", type=rates, metavar="R[,R]", help="requests per second; inf: all at once; default 1, or as recorded"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake or Qwen-Bailian trace")
    load.add_argument("--requests", type=positive, metavar="N", help=f"how many; default {d.requests}, or the trace")
    load.add_argument("--input-len", type=parse_range, metavar="LOW-HIGH", help="tokens that a user says in a turn")
    load.add_argument("--output-len", type=parse_range, metavar="LOW-HIGH", help="tokens of an answer")
    load.add_argument("--system-prompts", type=natural, metavar="N", help="different system prompts; 0: none")
    load.add_argument("--system-len", type=positive, metavar="N", help="tokens of a system prompt")
    load.add_argument("--turns", type=parse_range, metavar="LOW-HIGH", help="turns of a conversation")
    load.add_argument("--think-s", type=number(0), metavar="S", help="mean pause between turns")
    load.add_argument("--long-share", type=number(0, 1), metavar="P", help="share of conversations with a long input")
    load.add_argument("--long-len", type=parse_range, metavar="LOW-HIGH", help="tokens of a long input")
    load.add_argument("--cv", type=number(0.05, 20), metavar="X", help="of arrival gaps; 1: Poisson, more: bursts")


def synthetic(args: Namespace) -> Synthetic:
    """Raises: ConfigError if there is a trace as well, whose requests are as they are."""
    given: dict[str, Any] = {k: v for k in SYNTHETIC if (v := getattr(args, k)) is not None}
    shaping = sorted(set(given) - {"requests"})
    if args.trace is not None and shaping:
        raise ConfigError(f"--{shaping[0].replace('_', '-')} shapes made-up requests; it does not go with --trace")
    if args.trace is None and args.rate is None:
        args.rate = [1.0]
    found = Synthetic(**given)
    for key, on, other in (
        ("system_len", found.system_prompts, "--system-prompts above 0"),
        ("long_len", found.long_share, "--long-share above 0"),
        ("think_s", found.turns[1] > 1, "--turns above 1"),
    ):
        if key in given and not on:
            raise ConfigError(f"--{key.replace('_', '-')} has no effect without {other}")
    return found


def check_used(origins: Any) -> None:
    """Raises: ConfigError for a setting on the command line that a simulation would ignore."""
    for path, origin in origins.items():
        if origin.where.startswith("--") and path[0] not in USED and path[:2] not in USED_KEYS:
            raise ConfigError(
                f"config: {origin.where} has no effect on a simulation; it follows the settings of {', '.join(sorted(USED))}, "
                "engine.seed and engine.validate"
            )
