"""The limit of a process on open files, of which CPU ranks and the threads that save need some for each rank."""

from __future__ import annotations

import os
import resource

from dtrain.errors import ConfigError

_PER_RANK = 2  # the connection of gloo, and that of dtrain's messages
_OTHERS = 256  # files of data and checkpoints that are opened later


def reserve_descriptors(world_size: int) -> None:
    """Raises this process's limit on open files, if connections to ``world_size`` ranks exceed it.

    Raises:
        ConfigError: the system does not allow it.
    """
    num_open = len(os.listdir("/dev/fd"))
    needed = num_open + _PER_RANK * world_size + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"connections to {world_size} ranks need {needed} open files in each process ({num_open} are open here), "
            f"and the system allows {hard}; raise the hard limit, such as by ulimit -n {needed} in a shell of root, "
            f"nofile in /etc/security/limits.conf, LimitNOFILE= of the service, or --ulimit nofile={needed} of the "
            f"container"
        )
    wanted = 2 * needed  # pipes take two a rank, and one more while they are opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
