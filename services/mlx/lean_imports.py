"""Import mlx-lm without the libraries that only its tokenizers and downloads need.

A target or a drafter gets tokens and a folder. `transformers` and the hub's client, which mlx-lm
imports anyway, would cost each process a second and a lot of memory. They are replaced by empty
modules, whose classes can be imported and derived from, but not used.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEFT_OUT = ("transformers", "huggingface_hub")


class _Unused:
    """A class that is never instantiated."""

    @classmethod
    def register(cls, *args: object, **kwargs: object) -> None:
        """Accept the registration of tokenizer classes on import."""


class _EmptyModule(ModuleType):
    """A module that has every class asked for."""

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
        """Do nothing: the module is empty."""


def leave_out_unused_libraries() -> None:
    """Install the empty modules; call before `mlx_lm` is imported."""
    sys.meta_path.insert(0, _Finder())
