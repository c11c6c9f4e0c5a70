"""Makes every Python that has this folder on its path one of a later release, which speaks another protocol."""

from midstep.protocol import codec

codec.PROTOCOL_VERSION += 1
