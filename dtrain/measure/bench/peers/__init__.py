"""The libraries that dtrain is compared with: each peer is a short script, as users of the library write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from dtrain.errors import ConfigError, nearest


@dataclass(frozen=True)
class Peer:
    """A library, or one of its modes, that trains on several ranks.

    Attributes:
        module: of this package; its ``prepare(model, settings, **options)`` returns a ``plain.Training``.
        options: differ between peers of the same module.
        package: required beside torch.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    package: str | None = None

    @property
    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


PLAIN = Peer("plain")
DEFAULT_PEERS: dict[str, Peer] = {
    "ddp": Peer("ddp"),
    "ddp_zero": Peer("ddp_zero"),
    "accelerate": Peer("accelerate_ddp", package="accelerate"),
    "fsdp2": Peer("fsdp2", {"reshard_after_forward": True}),
    "fsdp2_no_reshard": Peer("fsdp2", {"reshard_after_forward": False}),
    **{f"deepspeed_{stage}": Peer("deepspeed_zero", {"stage": stage}, package="deepspeed") for stage in (1, 2, 3)},
}
"""The peers of ``bench.peers=null``: each library as its users set it up."""
PEERS: dict[str, Peer] = DEFAULT_PEERS | {
    f"deepspeed_{stage}_fp32": Peer("deepspeed_zero", {"stage": stage, "fp32_sums": True}, package="deepspeed")
    for stage in (1, 2, 3)
}
"""The peers by name, as in ``bench.peers`` and the tables."""


def check_peers(names: Sequence[str], ranks: int) -> None:
    """Checks ``bench.peers`` against the known peers, and against ``bench.ranks``.

    Raises:
        ConfigError: not a peer's name, a duplicate, or one rank, with which no peer runs.
    """
    if names and ranks == 1:
        raise ConfigError(f"bench.peers={list(names)} has no effect with bench.ranks=1: peers run on several ranks")
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"bench.peers: unknown peer '{name}'{nearest(name, PEERS)}")
        if list(names).count(name) > 1:
            raise ConfigError(f"bench.peers={list(names)} lists '{name}' more than once")
