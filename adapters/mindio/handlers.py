"""The handlers that a script registers, and how they are called: MindIO's order of arguments."""

from collections.abc import Callable
from typing import Any, TypeAlias

from ...protocol.compat import StrEnum

Handler: TypeAlias = Callable[..., Any]


class HandlerKind(StrEnum):
    """The purposes of handlers."""

    STOP = "stop"
    CLEAN = "clean"
    REBUILD_GROUP = "rebuild_group"
    REPAIR = "repair"
    ROLLBACK = "rollback"
    SAVE_CKPT = "save_ckpt"
    RENAME = "rename"
    EXIT = "exit"
    STREAM_SYNC = "stream_sync"
    DECRYPT = "decrypt"
    ZIT_UPGRADE_ROLLBACK = "zit_upgrade_rollback"
    ZIT_UPGRADE_REPAIR = "zit_upgrade_repair"
    ZIT_UPGRADE_REBUILD = "zit_upgrade_rebuild"
    ZIT_DOWNGRADE_REBUILD = "zit_downgrade_rebuild"


_WITHOUT_CONTEXT = frozenset({HandlerKind.STREAM_SYNC, HandlerKind.RENAME})


class Handlers:
    """The registered handlers, by kind. `arguments` is what the training function was called with, or what was set."""

    def __init__(self) -> None:
        """Begin with none."""
        self._registered: dict[HandlerKind, tuple[Handler, Any]] = {}
        self.arguments: Any = None

    def register(self, kind: HandlerKind, func: Handler, ctx: Any = None) -> None:
        """Register a handler in place of an earlier one. Raises TypeError for what cannot be called."""
        if not callable(func):
            raise TypeError(f"the {kind} handler must be callable, and is a {type(func).__name__}")
        self._registered[kind] = (func, ctx)

    def has(self, kind: HandlerKind) -> bool:
        """Return whether there is a handler of a kind."""
        return kind in self._registered

    def call(self, kind: HandlerKind, *arguments: Any) -> Any:
        """Call a handler with these arguments and its context; do nothing where none is registered."""
        if kind not in self._registered:
            return None
        func, ctx = self._registered[kind]
        return func(*arguments) if kind in _WITHOUT_CONTEXT else func(*arguments, ctx)

    def rename(self, step: int, *, mindspore: bool) -> None:
        """Call the rename handler, which MindSpore wants its context in, and others the training's arguments."""
        if HandlerKind.RENAME in self._registered:
            func, ctx = self._registered[HandlerKind.RENAME]
            func(step, ctx if mindspore else self.arguments)


HANDLERS = Handlers()


def _registrar(kind: HandlerKind, doc: str) -> Callable[..., None]:
    """Make the function that registers handlers of a kind, with MindIO's parameters."""

    def register(func: Handler, ctx: Any = None) -> None:
        HANDLERS.register(kind, func, ctx)

    register.__name__ = register.__qualname__ = f"tft_register_{kind}_handler"
    register.__doc__ = f"Register {doc}"
    return register


def _elastic(kind: HandlerKind) -> Callable[..., None]:
    return _registrar(kind, "a handler of elastic training. It is kept and never called: worlds change size otherwise.")


tft_register_stop_handler = _registrar(
    HandlerKind.STOP, "`func(args, ctx)`: it stops the device, so the training thread returns from what it waits for."
)
tft_register_clean_handler = _registrar(
    HandlerKind.CLEAN, "`func(is_uce_error, args, ctx)`: it makes the device usable again, and returns 0, 1 or 2."
)
tft_register_rebuild_group_handler = _registrar(
    HandlerKind.REBUILD_GROUP, "`func(fault_ranks, args, ctx)`: it makes the process groups again, with new processes."
)
tft_register_repair_handler = _registrar(
    HandlerKind.REPAIR,
    "`func(step, need_rebuild, error_ranks, repair_info, args, ctx)`: it sends or receives lost state.",
)
tft_register_rollback_handler = _registrar(
    HandlerKind.ROLLBACK, "`func(step, args, ctx)`: it puts everything back to `step`."
)
tft_register_save_ckpt_handler = _registrar(
    HandlerKind.SAVE_CKPT,
    "`func(step, save_info, args, ctx)`: it writes an emergency checkpoint under a temporary name.",
)
tft_register_rename_handler = _registrar(
    HandlerKind.RENAME, "`func(step, args)`, for MindSpore `func(step, ctx)`: it gives the checkpoint its final name."
)
tft_register_exit_handler = _registrar(HandlerKind.EXIT, "`func(ctx)`: it is called before the process is ended.")
tft_register_stream_sync_handler = _registrar(
    HandlerKind.STREAM_SYNC, "`func()`: it waits for the device at a boundary between two steps."
)
tft_register_zit_upgrade_rollback_handler = _elastic(HandlerKind.ZIT_UPGRADE_ROLLBACK)
tft_register_zit_upgrade_repair_handler = _elastic(HandlerKind.ZIT_UPGRADE_REPAIR)
tft_register_zit_upgrade_rebuild_handler = _elastic(HandlerKind.ZIT_UPGRADE_REBUILD)
tft_register_zit_downgrade_rebuild_handler = _elastic(HandlerKind.ZIT_DOWNGRADE_REBUILD)


def tft_register_decrypt_handler(decryptor: Handler) -> None:
    """Take what decrypts the password of MindIO's TLS key. It is unused: midstep's lines have keys of their own."""
    if decryptor is not None:
        HANDLERS.register(HandlerKind.DECRYPT, decryptor)
