"""`midstep`: the command line. Commands are imported when they are called, so that `--help` is quick."""

import difflib
from importlib import import_module
from typing import Any

import click

from .. import __version__
from .display.plain import escape_what_cannot_be_encoded
from .views.wording import harmless

# name -> what it is for, in the order in which the help lists them
COMMANDS = {
    "run": "Run a training script with process-level recovery (torchrun's flags).",
    "resume": "Continue a job whose launcher or machine was lost.",
    "demo": "Kill ranks and nodes of a small training job and watch it recover.",
    "status": "Show where a job stands.",
    "page": "Serve a page that shows how a job stands, for a browser.",
    "watch": "Tell another program when a job's leader or phase changes.",
    "report": "Show what happened in a job: incidents, phases, reasons.",
    "what-if": "Tell what the loss of nodes or ranks would cost a running job now.",
    "bundle": "Put together what another person needs to look into a job, without its secrets.",
    "detect": "Report faults of devices and nodes to a job, from documents or another program.",
    "clusterd": "Speak for a job with MindCluster's ClusterD.",
    "inject": "Cause a fault on purpose, now or at an injection point of a step or a recovery.",
    "pause": "Have all ranks stand still between two steps for a while, or train on.",
    "perform": "Have ranks perform an action between two steps: switch network cards, test devices.",
    "save": "Have a checkpoint written at the next step boundary.",
    "restart": "Give a rank another process, between two steps.",
    "drain": "Move the ranks of a node to a spare one, between two steps.",
    "isolate": "Leave a node at once.",
    "release": "Use a node again that was drained or isolated.",
    "isolated": "List the devices that jobs have isolated for the next ones, or release some.",
    "rungs": "Forbid a rung of the ladder, or force one, for a time.",
    "acknowledge": "Say that you have seen what a job asks for.",
    "stop": "End a job, with an emergency checkpoint.",
    "promote": "Let another controller of a job lead.",
    "pause-failover": "Keep the controllers that stand by from taking over for a while.",
    "doctor": "Say what would work on this machine's devices, and try it.",
    "simulate": "Forecast what a policy would do in a month of faults, before a job is started.",
    "policy": "Check a policy file, ask what it would do, or make one of an acjob.",
    "token": "Make the secret that all machines of a job have.",
    "submit": "Put a job into etcd or a directory, for controllers and agents that you start.",
    "controller": "Run the controller of a job (`run` does it for you).",
    "agent": "Run the agent of a node (`run` does it for you).",
    "proxy": "Speak for many nodes with a job's controller, over one connection.",
    "platform": "Make the nodes of a job on an engine that you have.",
}
# Commands that share a module or are in a folder; each other one has a module of its name, and is its `command`.
_TOGETHER = {
    "stop": "orders",
    "promote": "orders",
    "pause-failover": "orders",
    "page": "page.command",
    **dict.fromkeys(
        ("pause", "save", "restart", "drain", "isolate", "release", "rungs", "acknowledge"),
        "controls",
    ),
}


class Lazy(click.Group):
    """A group of commands, each in a module of its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        attribute = cmd_name.replace("-", "_")
        module = import_module(f".{_TOGETHER.get(cmd_name, attribute)}", __package__)
        command: click.Command = getattr(module, attribute if cmd_name in _TOGETHER else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is meant; for one that is not there, name the nearest."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else f" Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it says of an error may come from files and other programs."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = harmless(error.message)  # click has it final, and shows it as it is
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="midstep")
def main() -> None:
    """Process-level rescheduling for distributed training: kill a rank, and only that rank comes back.

    Start with `midstep demo`, then `midstep run --nproc-per-node 4 train.py`.
    """
    escape_what_cannot_be_encoded()


if __name__ == "__main__":
    main()
