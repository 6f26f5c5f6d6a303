"""``minisgl bench schemas``: does every answer that is held to a JSON schema fit it? Schemas of a public suite, through the HTTP API.

A suite is a folder, for example ``json/tests`` of the ``jsonschema`` source distribution (JSON-Schema-Test-Suite, MIT). Each schema
is either refused with 400, or its finished answers have to validate, with the draft that it names or that its folder is called after.
What is not strict may be enforced in part only, so the answers' faults are counted there, but are none of the server's.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from minisgl.base.errors import ConfigError
from minisgl_cli.bench.offline import positive
from minisgl_cli.bench.report import json_line, table
from minisgl_cli.bench.serve import Server, server_arguments, server_of
from minisgl_cli.options import parse, set_logging
from minisgl_cli.simulate.options import natural

DRAFTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MODES: Mapping[str, tuple[bool, ...]] = {"strict": (True,), "lenient": (False,), "both": (True, False)}
PROMPT = "A short JSON value of this schema: "
# Answers of other schemas go before the question: small models would go on for ever, or repeat the schema.
EXAMPLES: Sequence[tuple[Any, str]] = (
    ({"type": "integer"}, "7"),
    (
        {"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array"}}},
        '{"name": "Ann", "tags": ["a", "b"]}',
    ),
    ({"minLength": 2}, '"blue"'),
)
TARGET_ACCEPTED, TARGET_FINISHED = 0.7, 0.8
SHOWN = 10  # kinds of refusals


@dataclass(frozen=True, slots=True)
class Case:
    """``name``: file and description. ``schema``: says its draft, so that server and validator agree on it."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: "refused", "finished", "unchecked" where a finished answer's schema has an expression that only other
    validators know, "cut" by max_tokens, or "failed". ``text``: the answer, or why there is none. ``fault``: why a finished
    answer does not fit, "" if it does. ``tokens``: of the answer."""

    case: Case
    strict: bool
    status: str
    text: str
    fault: str = ""
    tokens: int = 0


def arguments(parser: ArgumentParser) -> None:
    server_arguments(parser, temperature=1.0)
    suite = parser.add_argument_group("suite")
    suite.add_argument(
        "--suite", type=Path, required=True, metavar="FOLDER", help="JSON files: schemas, or test groups"
    )
    suite.add_argument(
        "--draft", action="append", choices=sorted(DRAFTS), help="only these folders of it; may be repeated"
    )
    suite.add_argument("--count", type=positive, default=200, metavar="N", help="schemas to draw (200)")
    suite.add_argument("--bench-seed", type=natural, default=0, metavar="N", help="of the draw and of each answer (0)")
    suite.add_argument("--mode", choices=sorted(MODES), default="strict", help="the request's 'strict' (strict)")
    asking = parser.add_argument_group("requests")
    asking.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of each answer (256)")
    asking.add_argument("--concurrency", type=positive, default=16, metavar="N", help="requests at once (16)")
    parser.add_argument(
        "--outcomes", type=Path, metavar="FILE", help="write every schema and its answer, as JSON lines"
    )


def run(argv: list[str]) -> int:
    """Ask and report; returns the exit code, 1 if an answer does not fit its strict schema or a request failed."""
    if find_spec("jsonschema") is None:
        raise ConfigError("bench schemas needs package 'jsonschema': pip install 'minisgl[dev]'")
    loaded, _, _, args = parse(argv, verb="bench schemas", extra=arguments)
    set_logging(loaded)
    cases = drawn(read_suite(args.suite, args.draft), args.count, args.bench_seed)
    key = loaded.settings.server.api_key.get_secret_value().split(",")[0].strip()
    with server_of(args, argv, loaded, key) as server, ThreadPoolExecutor(args.concurrency) as pool:
        asked = [(case, strict) for strict in MODES[args.mode] for case in cases]
        outcomes = list(pool.map(lambda one: ask(server, key, args, *one), asked))
    return report(args, server, outcomes)


# ------------------------------------------------------------------------------------------------------------ the suite


def read_suite(folder: Path, drafts: Sequence[str] | None = None) -> list[Case]:
    """Every different schema that is an object, in order of files. Raises: ConfigError if there is none."""
    found: dict[str, Case] = {}
    for path in sorted(folder.rglob("*.json")):
        at = path.relative_to(folder).parts[:-1]
        if "draft-next" in at or (drafts and not set(drafts) & {*at, folder.name}):
            continue
        default = next((DRAFTS[part] for part in (*at, folder.name) if part in DRAFTS), DRAFTS["draft2020-12"])
        for name, schema in schemas_of(path):
            if isinstance(schema, dict):
                case = Case(name, {"$schema": default, **schema})
                found.setdefault(json.dumps(case.schema, sort_keys=True), case)
    if not found:
        raise ConfigError(
            f"--suite {folder}: no schemas; it is to be a folder of JSON files, such as json/tests of the source of jsonschema"
        )
    return list(found.values())


def schemas_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The schema that a file is, or those of its test groups. Raises: ConfigError for what is no JSON."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ConfigError(f"--suite: {path} is no JSON: {exc}") from None
    if not isinstance(content, list):
        yield path.name, content
        return
    for group in content:
        if isinstance(group, dict) and "schema" in group:
            yield f"{path.name}: {group.get('description', '')}", group["schema"]


def drawn(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    return random.Random(seed).sample(cases, min(count, len(cases)))


# ------------------------------------------------------------------------------------------------------------- requests


def ask(server: Server, key: str, args: Namespace, case: Case, strict: bool) -> Outcome:
    """One chat request, answered and checked."""
    form = {"name": "answer", "strict": strict, "schema": case.schema}
    body = {
        "model": server.model,
        "messages": conversation(case.schema),
        "response_format": {"type": "json_schema", "json_schema": form},
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.bench_seed,
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    url = server.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    try:
        with urlopen(HttpRequest(url, json.dumps(body).encode(), headers), timeout=args.timeout_s) as answer:
            return judged(case, strict, json.load(answer))
    except HTTPError as exc:
        why = exc.read().decode("utf-8", "replace")
        return Outcome(case, strict, "refused" if exc.code == 400 else "failed", message_of(why))
    except (URLError, OSError, ValueError, LookupError, TypeError) as exc:
        return Outcome(case, strict, "failed", f"{type(exc).__name__}: {exc}")


def conversation(schema: Mapping[str, Any]) -> list[dict[str, str]]:
    asked = [(PROMPT + json.dumps(example), answer) for example, answer in EXAMPLES]
    pairs = [message for question, answer in asked for message in (_said("user", question), _said("assistant", answer))]
    return [*pairs, _said("user", PROMPT + json.dumps(schema))]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def judged(case: Case, strict: bool, answer: Mapping[str, Any]) -> Outcome:
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] != "stop":
        return Outcome(case, strict, "cut", text, tokens=tokens)
    try:
        return Outcome(case, strict, "finished", text, misfit(case.schema, text), tokens)
    except re.error:  # \\p{...} is not of Python
        return Outcome(case, strict, "unchecked", text, tokens=tokens)


def misfit(schema: Mapping[str, Any], text: str) -> str:
    """Why ``text`` is no JSON of this schema, by its own draft and with its formats; "" if it is.

    Raises: re.error for an expression that Python does not know.
    """
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError
    from jsonschema_specifications import REGISTRY

    cls: Any = validators.validator_for(schema)
    try:
        value = json.loads(text)
        cls(schema, registry=REGISTRY, format_checker=cls.FORMAT_CHECKER).validate(value)
    except (ValidationError, ValueError) as exc:
        return str(exc).splitlines()[0]
    except re.error:
        raise
    except Exception as exc:  # for example a reference to what is elsewhere, which is to be refused
        return f"cannot be validated: {type(exc).__name__}: {exc}"
    return ""


def message_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]


# --------------------------------------------------------------------------------------------------------------- report


def report(args: Namespace, server: Server, outcomes: Sequence[Outcome]) -> int:
    sides = {
        mode: [o for o in outcomes if o.strict is strict] for mode, strict in (("strict", True), ("lenient", False))
    }
    results = {mode: summary(side) for mode, side in sides.items() if side}
    table(f"bench schemas: {args.suite}", [{"mode": mode, **r} for mode, r in results.items()])
    why = Counter(first_line(o.text) for o in outcomes if o.status == "refused")
    for reason, times in why.most_common(SHOWN):
        print(f"refused ({times}): {reason}")
    wrong = [o for o in outcomes if o.status == "failed" or (o.fault and o.strict)]
    for o in wrong[:SHOWN]:
        print(f"wrong: {o.case.name}: {o.fault or first_line(o.text)}")
    if args.outcomes is not None:
        args.outcomes.write_text("".join(json.dumps(asdict(o)) + "\n" for o in outcomes), "utf-8")
    met = {
        mode: {"accepted": r["accepted"] >= TARGET_ACCEPTED, "finished": r["finished"] >= TARGET_FINISHED}
        for mode, r in results.items()
    }
    json_line(
        "schemas", server=server.about, model=server.model, suite=str(args.suite), drafts=args.draft, seed=args.bench_seed,
        max_tokens=args.max_tokens, temperature=args.temperature, results=results,
        refusals=dict(why.most_common(SHOWN)), met=met,
    )  # fmt: skip
    return 1 if wrong else 0


def first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:100]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``accepted`` of all, ``finished`` of the accepted; ``misfits``: finished answers that are not what the schema says."""
    count = Counter(o.status for o in outcomes)
    finished = count["finished"] + count["unchecked"]
    accepted = finished + count["cut"]
    return {
        "schemas": len(outcomes),
        "refused": count["refused"],
        "accepted": accepted / len(outcomes),
        "finished": finished / max(accepted, 1),
        "misfits": sum(bool(o.fault) for o in outcomes),
        "unchecked": count["unchecked"],
        "failed": count["failed"],
        "tokens": sum(o.tokens for o in outcomes),
    }
