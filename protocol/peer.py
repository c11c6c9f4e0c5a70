"""The connections of one identity to a router: the newest is the valid one."""

REPLACED_REMEMBERED = 16  # earlier connections of one identity that stay unheard


class Peer:
    """The connections of one identity: the valid one, and those that it replaced."""

    __slots__ = ("replaced", "routing_id")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.replaced: tuple[bytes, ...] = ()

    def move_to(self, routing_id: bytes) -> None:
        """Take `routing_id` as the valid connection from now on."""
        self.replaced = (self.routing_id, *self.replaced[: REPLACED_REMEMBERED - 1])
        self.routing_id = routing_id
