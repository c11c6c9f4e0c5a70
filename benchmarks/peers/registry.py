"""All peers by the name that `--peers` takes, in the order of the table."""

from . import dlrover, ft_launcher, hsdp, inprocess, midstep, plain, torchft, torchrun
from .plan import Peer

PEERS: dict[str, Peer] = {
    "midstep": midstep.PEER,
    "torchft": torchft.PEER,
    "inprocess": inprocess.PEER,
    "dlrover": dlrover.PEER,
    "ft_launcher": ft_launcher.PEER,
    "torchrun": torchrun.PEER,
    "plain": plain.PEER,
}
SHARDED: dict[str, Peer] = {
    "hsdp.midstep": hsdp.midstep.PEER,
    "hsdp.torchft": hsdp.torchft.PEER,
    "hsdp.lm_resiliency": hsdp.lm_resiliency.PEER,
    "hsdp.torchrun": hsdp.torchrun.PEER,
    "hsdp.plain": hsdp.plain.PEER,
}
