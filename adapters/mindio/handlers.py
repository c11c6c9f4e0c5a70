"""The handlers that a script registers, and how they are called: MindIO's order of arguments."""

from collections.abc import Callable
from typing import Any, TypeAlias

from ...protocol.enums import StrEnum

Handler: TypeAlias = Callable[..., Any]


class HandlerKind(StrEnum):
    """What a handler is for."""

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
    """What is registered, by kind. `arguments` is what the training function was called with, or what was set."""

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


def tft_register_stop_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(args, ctx)`: the device is stopped, so that the training thread returns from what it waits for."""
    HANDLERS.register(HandlerKind.STOP, func, ctx)


def tft_register_clean_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(is_uce_error, args, ctx)`, which makes the device usable again and returns 0, 1 or 2."""
    HANDLERS.register(HandlerKind.CLEAN, func, ctx)


def tft_register_rebuild_group_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(fault_ranks, args, ctx)`: the process groups are made again, with new processes in them."""
    HANDLERS.register(HandlerKind.REBUILD_GROUP, func, ctx)


def tft_register_repair_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(step, need_rebuild, error_ranks, repair_info, args, ctx)`, which sends or receives lost state."""
    HANDLERS.register(HandlerKind.REPAIR, func, ctx)


def tft_register_rollback_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(step, args, ctx)`: everything is put back to `step`."""
    HANDLERS.register(HandlerKind.ROLLBACK, func, ctx)


def tft_register_save_ckpt_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(step, save_info, args, ctx)`, which writes an emergency checkpoint under a temporary name."""
    HANDLERS.register(HandlerKind.SAVE_CKPT, func, ctx)


def tft_register_rename_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(step, args)`, for MindSpore `func(step, ctx)`, which gives the checkpoint its final name."""
    HANDLERS.register(HandlerKind.RENAME, func, ctx)


def tft_register_exit_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func(ctx)`, which is called before the process is ended."""
    HANDLERS.register(HandlerKind.EXIT, func, ctx)


def tft_register_stream_sync_handler(func: Handler, ctx: Any = None) -> None:
    """Register `func()`, which waits for the device at a boundary between two steps."""
    HANDLERS.register(HandlerKind.STREAM_SYNC, func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Handler, ctx: Any = None) -> None:
    """Register a handler of elastic training. It is kept and never called: worlds change their size otherwise here."""
    HANDLERS.register(HandlerKind.ZIT_UPGRADE_ROLLBACK, func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Handler, ctx: Any = None) -> None:
    """Register a handler of elastic training, as `tft_register_zit_upgrade_rollback_handler`."""
    HANDLERS.register(HandlerKind.ZIT_UPGRADE_REPAIR, func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Handler, ctx: Any = None) -> None:
    """Register a handler of elastic training, as `tft_register_zit_upgrade_rollback_handler`."""
    HANDLERS.register(HandlerKind.ZIT_UPGRADE_REBUILD, func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Handler, ctx: Any = None) -> None:
    """Register a handler of elastic training, as `tft_register_zit_upgrade_rollback_handler`."""
    HANDLERS.register(HandlerKind.ZIT_DOWNGRADE_REBUILD, func, ctx)


def tft_register_decrypt_handler(decryptor: Handler) -> None:
    """Take what decrypts the password of MindIO's TLS key; midstep's lines have keys of their own, so it is unused."""
    if decryptor is not None:
        HANDLERS.register(HandlerKind.DECRYPT, decryptor)
