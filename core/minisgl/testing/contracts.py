"""The contract kit: pytest classes that check a plugin against what its kind promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from minisgl.base.component import Component
from minisgl.base.errors import ConfigError
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry, import_target
from minisgl.plugin.shape import check_shape

CONTRACTS = {  # imported when asked for: those of attention and logits import torch
    "attention": "minisgl.testing.contract_attention:AttentionContract",
    "cache": "minisgl.testing.contract_cache:CacheContract",
    "logits": "minisgl.testing.contract_logits:LogitsContract",
    "loop": "minisgl.testing.contract_loop:LoopContract",
    "scheduler": "minisgl.testing.contract_scheduler:SchedulerContract",
}

LOAD = """
import sys
from minisgl.plugin.registry import Registry, import_target
Registry.scan().load({kind!r}, {name!r})
heavy = {{"torch", "transformers"}} & set(sys.modules)
assert not heavy, f"importing it imports {{heavy}}"
"""


class ComponentContract:
    """What holds for every kind. ``name`` is None for a class that is not an entry point."""

    kind: ClassVar[str]
    name: ClassVar[str | None]
    cls: ClassVar[type[Component]]
    options: ClassVar[Mapping[str, Any]]

    def settings(self) -> Any:
        return self.cls.Settings(**self.options)

    def test_has_the_shape_of_its_kind(self) -> None:
        fault = check_shape(KINDS[self.kind], self.cls)
        assert fault is None, f"{self.cls.__qualname__} {fault}"

    def test_settings_have_valid_defaults_and_refuse_unknown_options(self) -> None:
        defaults = self.cls.Settings()
        again = self.cls.Settings.model_validate(defaults.model_dump())
        assert again == defaults, f"{again!r} != {defaults!r}"
        with pytest.raises(ValidationError):
            self.cls.Settings(no_such_option_=1)  # type: ignore[call-arg]

    def test_loads_in_a_fresh_process_without_torch(self) -> None:
        if self.name is None:
            pytest.skip("not an entry point: other processes cannot load it")
        if KINDS[self.kind].torch:
            pytest.skip(f"{self.kind} plugins may import torch")
        code = LOAD.format(kind=self.kind, name=self.name)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def make_contract(kind: str, target: str | type, options: Mapping[str, Any]) -> type:
    """See minisgl.testing.contract."""
    if kind not in CONTRACTS:
        raise ConfigError(f"there is no contract for kind {kind!r}; there is one for {', '.join(sorted(CONTRACTS))}")
    contract: type[ComponentContract] = import_target(CONTRACTS[kind])
    if isinstance(target, str):
        name, cls = target, Registry.scan().load(kind, target)
    else:
        name, cls = None, target
    title = f"Test{kind.title()}{(name or cls.__name__).title()}"
    attributes = {"kind": kind, "name": name, "cls": cls, "options": dict(options), "__test__": True}
    return type(title, (contract,), attributes)
