"""ReplicaInfo: which replica this code runs in."""

from __future__ import annotations

import contextvars
import dataclasses

__all__ = ["CURRENT", "ReplicaInfo", "current_replica"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One replica of a cluster, as its own code sees it."""

    index: int  #: from 0 to ``replicas - 1``
    replicas: int  #: the number of replicas of the cluster
    epoch: int  #: 1 in the first process of this replica, and one more in each process that takes its place


#: The replica in which a task or a thread runs.
CURRENT: contextvars.ContextVar[ReplicaInfo | None] = contextvars.ContextVar("aiocuda_replica", default=None)


def current_replica() -> ReplicaInfo | None:
    """Return the replica that the calling code runs in; None outside of a replica.

    It is known in the constructor and in all methods of a class that `Cluster.spawn` has created::

        class Trainer:
            def __init__(self):
                replica = aiocuda.cluster.current_replica()
                self.shard = (replica.index, replica.replicas)    # for DataLoader(shard=…)
    """
    return CURRENT.get()
