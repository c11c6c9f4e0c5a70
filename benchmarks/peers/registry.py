"""All peers by the name that `--peers` takes, in the order of the table."""

from . import ddp, dlrover, ft_launcher, inprocess, midstep, torchft, torchrun
from .plan import Peer

PEERS: dict[str, Peer] = {
    "midstep": midstep.PEER,
    "torchft": torchft.PEER,
    "inprocess": inprocess.PEER,
    "dlrover": dlrover.PEER,
    "ft_launcher": ft_launcher.PEER,
    "torchrun": torchrun.PEER,
    "ddp": ddp.PEER,
}
