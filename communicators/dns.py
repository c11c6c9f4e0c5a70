"""Limit name lookups (DNS) on connections to a TCPStore.

Torch's TCPStore, server and client, asks for the *name* of the other end of every new connection, only to log it. Where
the name server is slow or loses the query, each new connection stalls for the resolver's five seconds, and the server
stalls with it for all its clients. A recovery makes new connections and cannot afford that.
"""

import ctypes

_HOSTS, _FILES_ONLY = b"hosts", b"files"  # of nsswitch.conf
_QUERY_S = 1


class _ResolverState(ctypes.Structure):
    """The head of glibc's `struct __res_state`, from <resolv.h>."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
    )


def limit_dns_in_this_thread() -> None:
    """Limit name lookups in this thread to one query of one second. No effect where the C library is not glibc."""
    libc = ctypes.CDLL(None)
    try:
        init, state = libc.__res_init, libc.__res_state
    except AttributeError:
        return
    init()
    state.restype = ctypes.POINTER(_ResolverState)
    state().contents.retrans = _QUERY_S
    state().contents.retry = 1


def disable_dns_in_this_process() -> None:
    """Limit name lookups in all threads to the local files. No effect where the C library is not glibc.

    For the process that serves a TCPStore and does nothing else; call it before the server is made.
    """
    try:
        configure = ctypes.CDLL(None).__nss_configure_lookup
    except AttributeError:
        return
    configure(_HOSTS, _FILES_ONLY)
