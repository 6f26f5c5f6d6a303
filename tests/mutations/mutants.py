"""Mutants of functions, made by the operators of mutmut and by leaving out calls and conditions.

mutmut itself does not run them: it copies each function behind a trampoline, which properties do not survive and which
the tests that count Python calls notice. ``forks.py`` runs them instead.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import libcst as cst
from forks import ROOT, Mutant  # type: ignore[import-not-found]
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

MUTATED_DECORATORS = ("property", "classmethod", "staticmethod")


def leave_out_call(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """mutmut has no operator that removes a statement."""
    if len(node.body) == 1 and isinstance(node.body[0], cst.Expr) and isinstance(node.body[0].value, cst.Call):
        yield node.with_changes(body=[cst.Pass()])


def force_condition(node: cst.If) -> Iterator[cst.If]:
    """mutmut does this to conditional expressions alone."""
    for value in ("True", "False"):
        yield node.with_changes(test=cst.Name(value))


OPERATORS = [*mutation_operators, (cst.SimpleStatementLine, leave_out_call), (cst.If, force_condition)]


class Visitor(MutationVisitor):
    """Besides what mutmut mutates, properties."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            names = [d.decorator.value for d in node.decorators if isinstance(d.decorator, cst.Name)]
            return len(names) != len(node.decorators) or not set(names) <= set(MUTATED_DECORATORS)
        return bool(super()._skip_node_and_children(node))


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of the functions and methods of ``file``, a path from the root of the repository."""
    text = (ROOT / file).read_text()
    wrapper = MetadataWrapper(cst.parse_module(text))
    visitor = Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    numbers, out = Counter[str](), []
    functions = dict(_functions(wrapper.module))
    for m in visitor.mutations:
        if (function := functions.get(m.contained_by_top_level_function)) is not None:
            numbers[function] += 1
            name = f"{Path(file).stem}.{function}#{numbers[function]}"
            out.append(Mutant(name, file, function, text, partial(_mutated, wrapper.module, m)))
    return out  # without those of modules and classes: what is imported already is not made again


def _mutated(module: cst.Module, m: Mutation) -> str:
    mutated = deep_replace(module, m.original_node, m.mutated_node)
    assert isinstance(mutated, cst.Module), mutated
    return mutated.code


def _functions(module: cst.Module) -> Iterator[tuple[cst.CSTNode | None, str]]:
    """Top-level functions and methods, each with its qualified name."""
    for node in module.body:
        if isinstance(node, cst.FunctionDef):
            yield node, node.name.value
        elif isinstance(node, cst.ClassDef):
            yield from (
                (n, f"{node.name.value}.{n.name.value}") for n in node.body.body if isinstance(n, cst.FunctionDef)
            )


def sample(mutants: Sequence[Mutant], n: int, seed: int) -> list[Mutant]:
    """``n`` of them, the same for the same seed: one of each function in turn, until all are taken."""
    rng, by_function = random.Random(seed), {(m.file, m.function): list[Mutant]() for m in mutants}
    for m in mutants:
        by_function[m.file, m.function].append(m)
    for own in by_function.values():
        rng.shuffle(own)
    taken = {m.name for m in _in_turn(by_function.values(), n)}
    return [m for m in mutants if m.name in taken]


def _in_turn(groups: Iterable[list[Mutant]], n: int) -> list[Mutant]:
    left, out = [list(g) for g in groups], []
    while len(out) < n and (left := [g for g in left if g]):
        out += [g.pop() for g in left]
    return out[:n]
