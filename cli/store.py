"""The option that names what keeps a job: an etcd, or a folder on a volume of several machines."""

from collections.abc import Callable
from typing import Any

import click


def store_option(*, required: bool = False) -> Callable[[Any], Any]:
    """Add --store to a command."""
    return click.option(
        "--store",
        envvar="MIDSTEP_STORE",
        required=required,
        metavar="URL",
        help="The etcd that keeps the job: etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds:// for TLS with the "
        "files that ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY name; user and password as in ETCDCTL_USER. Or a "
        "folder that all machines share, and the Lease of Kubernetes that elects their controllers: "
        "kubernetes://[NAMESPACE]/LEASE?journal=/FOLDER.  "
        "[env: MIDSTEP_STORE]",
    )
