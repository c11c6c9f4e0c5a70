"""The options of `midstep run` for Kubernetes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Any], Any]
MOST_CONTROLLERS = 5
_FILE = click.Path(dir_okay=False, path_type=Path)


KUBERNETES: tuple[Decorator, ...] = (
    click.option("--image", metavar="IMAGE", help="Kubernetes: the image of all pods, with midstep and SCRIPT in it."),
    click.option(
        "--namespace", metavar="NAME", help="Kubernetes: where the objects are made.  [default: that of the context]"
    ),
    click.option("--dry-run", is_flag=True, help="Kubernetes: print the objects for `kubectl apply -f -`, make none."),
    click.option("--detach", is_flag=True, help="Kubernetes: do not follow the job once its objects are made."),
    click.option(
        "--resource",
        "resources",
        multiple=True,
        metavar="NAME=QUANTITY",
        help="Kubernetes: what each agent's pod gets, as huawei.com/Ascend910=8. Repeatable.",
    ),
    click.option(
        "--volume",
        "volumes",
        multiple=True,
        metavar="CLAIM:PATH",
        help="Kubernetes: a PersistentVolumeClaim, or a /FOLDER of the hosts, and where pods see it. The first one has "
        "journal and checkpoints. Repeatable.",
    ),
    click.option(
        "--pod-template",
        type=_FILE,
        metavar="FILE",
        help="Kubernetes: a part of a Pod's manifest that is laid over that of the agents: labels, annotations, "
        "schedulerName, tolerations; see docs/kubernetes-managed.md.",
    ),
    click.option(
        "--controller-template", type=_FILE, metavar="FILE", help="Kubernetes: the same for the controller's pod."
    ),
    click.option(
        "--launcher-template",
        type=_FILE,
        metavar="FILE",
        help="Kubernetes: with --roles, the same for the pod of the launcher of all roles.",
    ),
    click.option(
        "--controllers",
        type=click.IntRange(1, MOST_CONTROLLERS),
        default=1,
        show_default=True,
        metavar="N",
        help="Kubernetes: how many controllers the job has, each on a host of its own where that is possible. One "
        "leads, and another takes over when it is lost. More than one takes a --volume that pods on all hosts can "
        "write (ReadWriteMany), and a Lease elects them; or --store.",
    ),
    click.option(
        "--store",
        metavar="URL",
        help="Kubernetes: the etcd that keeps the job in the place of a volume, as its controllers reach it: "
        "etcd://HOST:PORT[,HOST:PORT...][/PREFIX]; see docs/controllers.md.",
    ),
    click.option(
        "--acjob",
        metavar="NAME",
        help="Kubernetes: take the policy from the labels and annotations that an AscendJob of MindCluster has in the "
        "cluster, as `midstep policy from-acjob` does from a file.",
    ),
    click.option(
        "--config-maps",
        multiple=True,
        metavar="NAMESPACE",
        help="Kubernetes: a namespace in whose ConfigMaps MindCluster's detectors leave faults of hardware, to be "
        "watched beside the controller, as by `midstep detect --config-maps`. Takes a Role there. Repeatable.",
    ),
    click.option(
        "--watch-nodes",
        is_flag=True,
        help="Kubernetes: leave hosts that are cordoned or tainted before their pods are evicted. Takes a ClusterRole.",
    ),
    click.option(
        "--node-condition",
        "node_conditions",
        multiple=True,
        metavar="TYPE",
        help="Kubernetes: a condition of hosts, as node-problem-detector's KernelDeadlock, that while it is True is a "
        "reason to leave them, as a taint is. Implies --watch-nodes. Repeatable.",
    ),
)
