"""``minisgl bench schemas`` in small, on the real model: each schema is refused or answered with what fits it (case 27)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import ConfigError
from minisgl_cli.bench import schemas

ACCEPTED: list[Any] = [
    {"type": "integer", "minimum": 3, "maximum": 900},
    {"enum": ["red", "green", 7, None]},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "additionalProperties": False,
     "$defs": {"n": {"type": "integer", "multipleOf": 5, "maximum": 100, "minimum": 0}}},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "integer", "minimum": 10, "maximum": 30}]},
    {"type": "integer", "not": {"minimum": 5}, "minimum": -5},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
     "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
     "required": ["kind"], "additionalProperties": False,
     "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["size"]}},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3, "contains": {"const": 4}},
]  # fmt: skip
REFUSED: list[Any] = [
    {"type": "array", "uniqueItems": True},
    {"$ref": "http://localhost:1/elsewhere"},
    {"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "integer"},
]


def test_27_every_schema_is_refused_or_its_answers_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [{"description": f"number {i}", "schema": s, "tests": []} for i, s in enumerate(ACCEPTED)]
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "groups.json").write_text(json.dumps(groups))
    for i, schema in enumerate(REFUSED):
        (tmp_path / "suite" / f"refused{i}.json").write_text(json.dumps(schema))
    options = ["--suite", str(tmp_path / "suite"), "--max-tokens", "60", "--outcomes", str(tmp_path / "outcomes")]
    assert schemas.run([*options, "--engine.seed=1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["strict"]
    assert (result["schemas"], result["refused"], result["failed"], result["misfits"]) == (13, 3, 0, 0)
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes").read_text().splitlines()]
    assert {o["case"]["name"] for o in outcomes if o["status"] == "refused"} == {f"refused{i}.json" for i in range(3)}
    assert [o for o in outcomes if o["status"] == "cut"] == []


def test_an_answer_is_checked_by_its_own_draft_and_with_formats() -> None:
    assert schemas.misfit({"type": "integer"}, "1") == ""
    assert "is not of type" in schemas.misfit({"type": "integer"}, '"1"')
    assert "is not a 'date'" in schemas.misfit({"format": "date"}, '"2023-02-30"')
    old = {"$schema": schemas.DRAFTS["draft7"], "items": [{"type": "integer"}]}
    assert schemas.misfit(old, "[1]") == ""
    assert "is not of type" in schemas.misfit(old, '["1"]')
    assert "cannot be validated" in schemas.misfit({"$ref": "http://localhost:1/x"}, "1")
    assert schemas.misfit({}, "{") != ""


def test_a_suite_gives_every_schema_once_with_its_draft(tmp_path: Path) -> None:
    for draft in ("draft7", "draft4", "draft-next"):
        (tmp_path / draft).mkdir()
        group = {"description": "d", "schema": {"type": "null"}, "tests": []}
        (tmp_path / draft / "a.json").write_text(json.dumps([group, group, {"schema": True}]))
    found = schemas.read_suite(tmp_path)
    assert [case.schema["$schema"] for case in found] == [schemas.DRAFTS["draft4"], schemas.DRAFTS["draft7"]]
    assert [case.name for case in schemas.read_suite(tmp_path, ["draft7"])] == ["a.json: d"]
    assert schemas.drawn(found, 9, 0) == schemas.drawn(found, 9, 0)
    with pytest.raises(ConfigError, match="no schemas"):
        schemas.read_suite(tmp_path / "none")
