"""Keeping name servers off the way to the store.

Torch's TCPStore, server and client, asks for the *name* of the other end of every new connection, only to have it in
its logs. Where the name server is slow or loses the question, each new connection stalls for the resolver's five
seconds, and the server stalls with it for everybody. A recovery makes new connections and cannot afford that.
"""

import ctypes

_HOSTS = b"hosts"
_FILES_ONLY = b"files"
_QUESTION_S = 1


class _ResolverState(ctypes.Structure):
    """The head of glibc's `struct __res_state`, from <resolv.h>."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
    )


def limit_dns_in_this_thread() -> None:
    """Let lookups in this thread be given up after one question and one second.

    Of no effect where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    try:
        init, state = libc.__res_init, libc.__res_state
    except AttributeError:
        return
    init()
    state.restype = ctypes.POINTER(_ResolverState)
    state().contents.retrans = _QUESTION_S
    state().contents.retry = 1


def disable_dns_in_this_process() -> None:
    """Let lookups in all threads end at the local files.

    For the process that serves the store and does nothing else; call it before the server is made. Of no effect where
    the C library is not glibc.
    """
    try:
        configure = ctypes.CDLL(None).__nss_configure_lookup
    except AttributeError:
        return
    configure(_HOSTS, _FILES_ONLY)
