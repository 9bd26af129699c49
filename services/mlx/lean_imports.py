"""Importing mlx-lm without the libraries that only its tokenizers and downloads need.

A target or a drafter gets tokens and a folder. `transformers` and the hub's client, which mlx-lm
imports all the same, would cost each process a second and a lot of memory. In their place stand
empty modules; their classes can be imported and derived from, but not used.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEFT_OUT = ("transformers", "huggingface_hub")


class _Unused:
    """A class that nobody calls."""

    @classmethod
    def register(cls, *args: object, **kwargs: object) -> None:
        """Tokenizer classes are registered when they are imported."""


class _EmptyModule(ModuleType):
    """Has every class that is asked for."""

    def __getattr__(self, name: str) -> type[_Unused]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Unused,), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in _LEFT_OUT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def leave_out_unused_libraries() -> None:
    """From now on; call before anything imports `mlx_lm`, in a process that only computes."""
    sys.meta_path.insert(0, _Finder())
