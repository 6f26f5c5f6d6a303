"""Named workloads of ``minisgl bench offline``: the same requests on every machine, drawn from one seed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from random import Random

from minisgl.base.errors import ConfigError

Range = tuple[int, int]
Ids = list[int]
VOCAB = 10_001  # prompt tokens are drawn from [0, VOCAB)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt of token ids, and how many tokens it is to get."""

    ids: Ids
    max_new: int


# Jobs to run together, and their outputs in the same order; the next jobs may depend on them.
Waves = Generator[list[Job], list[Ids], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, drawn evenly from ranges (both ends included). Each prompt begins with the same ``prefix_len`` tokens.
    ``prefix_cached``: they are computed before the clock starts. A later one of ``turns`` follows the answer to the one before
    and says ``input_len`` tokens more; the requests of a turn are sent together. ``temperature`` 0 is greedy."""

    name: str
    doc: str
    requests: int
    input_len: Range
    output_len: Range
    prefix_len: int = 0
    prefix_cached: bool = False
    turns: int = 1
    temperature: float = 0.6

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may come, with its output."""
        return self.prefix_len + self.turns * (self.input_len[1] + self.output_len[1])

    def waves(self, vocab: int, seed: int = 0) -> Waves:
        """All requests, for a model with ids below ``vocab``.

        The order of drawing is fixed: prefix; for every prompt its length, then its tokens; then the output lengths; then the
        same for each later turn. A smaller vocabulary does not change lengths: larger ids are folded into it.
        """
        rng = Random(seed)
        prefix = _tokens(rng, self.prefix_len, vocab)
        said = [list(prefix) for _ in range(self.requests)]
        for _ in range(self.turns):
            new = [_tokens(rng, rng.randint(*self.input_len), vocab) for _ in said]
            prompts = [before + words for before, words in zip(said, new, strict=True)]
            lengths = [rng.randint(*self.output_len) for _ in prompts]
            answers = yield [Job(ids, n) for ids, n in zip(prompts, lengths, strict=True)]
            said = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]

    def before(self, vocab: int, seed: int = 0) -> list[Job]:
        """What runs before the clock starts."""
        return [Job(_tokens(Random(seed), self.prefix_len, vocab), 1)] if self.prefix_cached else []

    def scaled(
        self,
        requests: int | None = None,
        input_len: Range | None = None,
        output_len: Range | None = None,
        prefix_len: int | None = None,
        turns: int | None = None,
        temperature: float | None = None,
    ) -> Workload:
        """With other sizes; None leaves one as it is. Raises: ConfigError for a size that this workload does not have."""
        for option, value, own in (("--prefix-len", prefix_len, self.prefix_len), ("--turns", turns, self.turns - 1)):
            if value is not None and not own:
                raise ConfigError(f"{option} {value} has no effect on the workload {self.name!r}; leave it out")
        given = {
            "requests": requests, "input_len": input_len, "output_len": output_len, "prefix_len": prefix_len,
            "turns": turns, "temperature": temperature,
        }  # fmt: skip
        changes = {key: value for key, value in given.items() if value is not None}
        return replace(self, **changes)  # type: ignore[arg-type]


def _tokens(rng: Random, n: int, vocab: int) -> Ids:
    return [rng.randint(0, VOCAB - 1) % vocab for _ in range(n)]


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("perf", "256 sequences of random lengths at once", 256, (100, 1024), (100, 1024)),
        Workload("single", "one sequence: time per token", 1, (512, 512), (128, 128), temperature=0.0),
        Workload("prefill-8k", "one prompt of 8,192 tokens", 1, (8192, 8192), (1, 1), temperature=0.0),
        Workload("prefill-32k", "one prompt of 32,768 tokens", 1, (32768, 32768), (1, 1), temperature=0.0),
        Workload(
            "shared-prefix",
            "256 requests after one cached prefix",
            256,
            (128, 128),
            (128, 128),
            4096,
            prefix_cached=True,
        ),
        Workload("conversations", "64 conversations of 4 turns", 64, (64, 64), (128, 128), 2000, turns=4),
    )
}


def find_workloads(names: Sequence[str]) -> list[Workload]:
    """By name; ``all`` is all of them. Raises: ConfigError."""
    if "all" in names:
        return list(WORKLOADS.values())
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workload {name!r} is not known; there are: {', '.join(WORKLOADS)}, all")
    return [WORKLOADS[name] for name in dict.fromkeys(names)]
