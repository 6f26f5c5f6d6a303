"""``minisgl generate "prompt"``: one answer on the terminal, as it comes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from typing import TYPE_CHECKING

from minisgl_cli.options import parse, set_logging
from minisgl_cli.profile import profile_arguments, tracer_of

if TYPE_CHECKING:
    from minisgl.base.types import SamplingParams
    from minisgl.client.pipeline import LLM


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: the model's")
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; default: the model's")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no summary")
    profile_arguments(parser)


def run(argv: list[str]) -> int:
    """Generate and print; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="generate", extra=arguments)
    set_logging(loaded)
    tracer = tracer_of(args)
    from minisgl.client.pipeline import LLM, Pipeline
    from minisgl.text.validate import check_sampling

    sampling = sampling_of(args)
    check_sampling(sampling)  # before the model is loaded
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    pipeline = Pipeline(
        loaded.settings,
        registry=registry,
        hooks=hooks,
        observers=[] if tracer is None else [tracer],
        show_progress=not args.quiet,
    )
    with LLM.on(pipeline) as llm, nullcontext() if tracer is None else tracer.tracing():
        return answer(llm, prompt, sampling, args)


def sampling_of(args: Namespace) -> SamplingParams:
    from minisgl.base.types import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )


def answer(llm: LLM, prompt: str, sampling: SamplingParams, args: Namespace) -> int:
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages = [*system, {"role": "user", "content": prompt}]
    usage = None
    try:
        for delta in llm.stream(prompt if args.raw else messages, sampling):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            usage = delta.usage or usage
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the shell's prompt comes on a line of its own
        raise
    sys.stdout.write("\n")
    if usage is not None and not args.quiet:
        print(f"[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated]", file=sys.stderr)
    return 0
