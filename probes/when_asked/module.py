"""A module that is imported when somebody asks something of it that is not known without it."""

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, TypeVar

Made = TypeVar("Made", bound="ModuleWhenAsked")


class ModuleWhenAsked(types.ModuleType):
    """Stands in `sys.modules` for a module, and becomes it when an attribute is asked for that is not here, or a module of a package."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, spec.parent
        if spec.submodule_search_locations is not None:
            self.__path__ = _Path(spec.submodule_search_locations, self.become)
        self._names: dict[str, Any] = {}

    def add_names(self, names: Mapping[str, Any]) -> None:
        """Attributes that are here until the module is."""
        self._names.update(names)
        vars(self).update(names)

    def drop_names(self) -> None:
        """From now on whoever asks for one of the names gets the module's own."""
        for name in self._names:
            vars(self).pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        self.become()
        return getattr(self, name)

    def become(self) -> None:
        """Imports the module into this one, as a dispatch mode that is on must not see. Where that fails this is as before."""
        if not isinstance(self, ModuleWhenAsked):  # it has become the module, and here is a method that was kept from before
            return
        from torch.utils._python_dispatch import _disable_current_modes

        kind, held, spec = type(self), dict(vars(self)), self.__spec__
        self.drop_names()
        afterwards = self.leaving()
        del self._names
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # the class of modules in mypy's eyes has no instances
        if spec.submodule_search_locations is not None:  # type: ignore[union-attr]
            self.__path__ = list(spec.submodule_search_locations)  # type: ignore[union-attr]
        try:
            with _disable_current_modes():
                spec.loader.exec_module(self)  # type: ignore[union-attr]
        except BaseException:
            self.__class__ = kind
            vars(self).update(held)
            raise
        afterwards()

    def leaving(self) -> Callable[[], None]:
        """Called before the module is imported; what it returns is called when it is."""
        return lambda: None


class _Path(list[str]):
    """A package's `__path__`, which is looked through when a module of the package is imported, and only then."""

    def __init__(self, folders: Iterable[str], when_looked_through: Callable[[], None]) -> None:
        super().__init__(folders)
        self._looked_through = when_looked_through

    def __iter__(self) -> Iterator[str]:
        self._looked_through()
        return super().__iter__()


def call(module: types.ModuleType, name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of the module's own, whether it has been asked before or not."""
    ModuleWhenAsked.become(module)  # type: ignore[arg-type]  # it may be one no longer
    return getattr(module, name)(*args, **kwargs)


def stand_in(name: str, make: Callable[[ModuleSpec], Made]) -> Made | None:
    """Puts what is made in a module's place; None where it is imported already, or not there."""
    parent_name, _, last = name.rpartition(".")
    parent = importlib.import_module(parent_name) if parent_name else None
    folders = parent.__spec__.submodule_search_locations if parent is not None and parent.__spec__ is not None else None
    spec = PathFinder.find_spec(name, folders)
    if name in sys.modules or spec is None or spec.loader is None:
        return None
    module = make(spec)
    sys.modules[name] = module
    if parent is not None:
        setattr(parent, last, module)
    return module
