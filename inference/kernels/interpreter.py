"""Triton's interpreter, several times faster: for tests and for counting bytes.

The interpreter exchanges the functions of Triton's language when a kernel starts, and again in
every call of a function by a kernel, where it changes nothing any more but takes milliseconds.
"""

from types import ModuleType
from typing import Any


def exchange_once() -> None:
    """From now on functions that kernels call exchange the language once, not in every call."""
    from triton.runtime import interpreter

    function, exchange = interpreter.InterpretedFunction, interpreter._patch_lang
    if getattr(function, "exchanges_once", False):
        return
    done: set[frozenset[str]] = set()
    bodies: dict[Any, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in bodies:
            used = (v.__name__ for v in self.fn.__globals__.values() if isinstance(v, ModuleType))
            languages = frozenset(name for name in used if name.startswith("triton.language"))
            if languages not in done:
                done.add(languages)
                exchange(self.fn)
            bodies[self.fn] = self.rewrite()
        return bodies[self.fn](*args, **kwargs)

    function.__call__ = call
    function.exchanges_once = True
